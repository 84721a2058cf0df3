"""Latency of single requests through 1P1D and through one aggregated engine, in turn.

Both are `pdserve up` with one core per worker and the same settings. Each round sends the same new
prompt to both. Reported are medians, and the median of the rounds' ratios of 1P1D to 1A. TPOT2 is
TPOT from the second token on, which excludes the hand-off. Without --model it creates and serves a
Llama of 205 million random parameters.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.serving import serving
from benchmarks.stats import alternate, compare
from pdserve.demo import MODEL_DIR

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from benchmarks.micro.serving import Serving
    from benchmarks.progress import Progress

OURS, BASELINE = "1P1D", "1A"
WORKERS: Final[Mapping[str, Mapping[str, int]]] = {
    OURS: {"prefill": 1, "decode": 1, "aggregated": 0},
    BASELINE: {"prefill": 0, "decode": 0, "aggregated": 1},
}
METRICS: Final = ("ttft_ms", "tt2t_ms", "tpot_ms", "tpot2_ms", "e2e_ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="DIR", help="a model directory, or demo")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--lengths", default="128,512,2048", metavar="N,...", help="prompt tokens")
    parser.add_argument(
        "--images",
        type=int,
        default=0,
        metavar="N",
        help="in each prompt, which then has LENGTHS words, in place of tokens; needs --model",
    )
    parser.add_argument("--tokens", type=int, default=129, metavar="N", help="an answer (129)")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="of each engine (512)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and notes. Raises BenchError."""
    if args.tokens < 3:
        raise BenchError("--tokens must be 3 or more")
    if args.images and args.model in ("", "demo"):
        raise BenchError("--images needs the --model of a directory: one that takes images")
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
        path = args.model
        if not path and args.engine == "vllm":
            progress.step("making a model of 205 million parameters")
            path = str(make_model(directory / "llama-205m"))
        engine: dict[str, Any] = {"max_num_seqs": 64}
        if args.engine == "vllm":
            engine["kv_cache_memory_bytes"] = args.kv_cache_mib << 20
        worker = {"model": path or "demo", "engine": args.engine, "engine_args": engine}
        services: dict[str, Serving] = {}
        for name, counts in WORKERS.items():
            progress.step(f"starting {name}")
            up: dict[str, Any] = {role: {"workers": count} for role, count in counts.items()}
            up |= {"cores_per_worker": 1}
            # This policy uses the prefill worker for every prompt, however short.
            starting = serving(name, directory / name, worker, up, policy="least_loaded")
            services[name] = await ending.enter_async_context(starting)
        lengths = map(int, args.lengths.split(","))
        return [await _measure(services, x, args, progress) for x in lengths], []


def make_model(folder: Path, tokenizer_of: Path = MODEL_DIR, **changes: int) -> Path:
    """Write a Llama with random bfloat16 weights and the tokenizer of another model. Return its
    directory. `changes`: fields of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = json.loads((tokenizer_of / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2656,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        **changes,
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=tokens["vocab_size"],
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokens["eos_token_id"],
        pad_token_id=tokens["pad_token_id"],
        bos_token_id=None,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(tokenizer_of, folder)
    return folder


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a model's tokenizer to another model's directory."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, target)


async def _measure(
    services: Mapping[str, Serving], length: int, args: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    moved = 0.0

    async def measure(name: str, number: int) -> dict[str, float]:
        nonlocal moved
        progress.step(f"{length} tokens, round {number + 1} of {args.rounds}, {name}")
        service, chance = services[name], random.Random(f"{length}/{number}")
        try:
            at, receipt = await service.ask(
                service.message(chance, length, args.images)
                if args.images
                else service.prompt(chance, length),
                args.tokens,
            )
        except TargetError as error:
            raise BenchError(f"{name}: {error}") from None
        moved = max(moved, float(receipt["transfer_bytes"]))
        return {
            "ttft_ms": at[0],
            "tt2t_ms": at[1] - at[0],
            "tpot_ms": (at[-1] - at[0]) / (len(at) - 1),
            "tpot2_ms": (at[-1] - at[1]) / (len(at) - 2),
            "e2e_ms": at[-1],
        }

    rounds = [x async for x in alternate(list(WORKERS), args.rounds, measure)]
    row: dict[str, Any] = {"prompt_words" if args.images else "prompt_tokens": length}
    for metric in METRICS:
        found = compare([{n: x[n][metric] for n in WORKERS} for x in rounds], BASELINE)
        row |= {f"{metric} {name}": found[name][0] for name in WORKERS}
        row[f"{metric} ratio"] = found[OURS][1]
    row["kv_mib"] = moved / 2**20
    return row
