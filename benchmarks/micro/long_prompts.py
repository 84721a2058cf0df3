"""TTFT that a router adds to long prompts, and its CPU time, compared with other routers. Each of
`--clients` chats has one prompt of `--bytes` and, after each answer of one token, another turn that
adds 3 KB. `first` is the first turn, sent by all clients at once; `later` are the following turns,
sequential for each client. Routers and servers are the same as in `router`: pdserve renders and
tokenises once, while each server of vllm-router must tokenise by itself, which these mock servers
do not. `direct` is the mock server without a router. With `--token-ids` prompts have token ids,
about one for every 5 bytes of `--bytes`, so no router tokenises. A router adds its median TTFT
minus the median of `direct`.

With `--engines` a prefill and a decode engine of vLLM, of a small random model, are behind each
router, and answers have two tokens, so both have work: `pdserve` beside `vllm-router-pd`, whose
servers are vLLM's with NIXL, as the arm `vllm-pd` of `pdserve bench compare`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.client import HttpTarget, Request
from benchmarks.compare.vllm_stack import STACKS, VllmStack, check_programs, stack_config
from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.router import (
    OURS,
    PEER_PD,
    RunningRouter,
    add_routers_option,
    chosen_routers,
    running,
)
from benchmarks.micro.unloaded import copy_tokenizer, make_model
from benchmarks.service import LocalService, processor_s
from benchmarks.stats import alternate, compare, percentiles
from pdserve.config.load import load_config, to_mapping
from pdserve.errors import ConfigError
from pdserve.model.hub import model_directory

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from benchmarks.progress import Progress

TIMEOUT_S: Final = 240.0
MAX_MODEL_LEN: Final = 1 << 20
NEW_BYTES: Final = 2000  # size of the user's message in each turn
ANSWER_BYTES: Final = 1000
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BYTES_OF_ID = 5  # bytes of text per token id, for `--token-ids`
_WORDS = (
    "the file has a function that returns its value if the test fails because of an error in line "
    "import self def class return None True async await for while with open read write path index "
    "request response token block cache router worker prefill decode model tenant session latency"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", default="20,200", metavar="N,...", help="at once (20,200)")
    parser.add_argument("--bytes", type=int, default=220_000, metavar="N", help="(220000)")
    parser.add_argument("--token-ids", action="store_true", help="prompts of as many token ids")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of each client (4)")
    parser.add_argument("--engines", action="store_true", help="vLLM behind all routers")
    add_routers_option(parser)
    parser.add_argument(
        "--model", default="smollm2", help="pdserve's tokenizer: a model as in worker.model"
    )


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all routers in turn. Return rows and notes. Raises BenchError."""
    names, notes = chosen_routers(args.only)
    if args.engines:
        names = [name for name in names if name in (OURS, PEER_PD)]
        if PEER_PD in names:
            check_programs(PEER_PD)
    counts = [int(x) for x in args.clients.split(",")]

    async def measure(name: str, number: int) -> dict[int, dict[str, float]]:
        found = {}
        for clients in counts:
            progress.step(f"round {number + 1} of {args.rounds}: {name}, {clients} clients")
            with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
                found[clients] = await _measure(name, Path(directory), clients, args)
        return found

    rounds = [x async for x in alternate(names, args.rounds, measure, warm_up=False)]
    rows: list[dict[str, Any]] = []
    for clients in counts:
        for name in names:
            row: dict[str, Any] = {"router": name, "clients": clients}
            for metric in rounds[0][name][clients]:
                values = [{n: x[n][clients][metric] for n in names} for x in rounds]
                row[metric], _ = compare(values, names[0])[name]
            rows.append(row)
    return rows, notes


async def _measure(
    name: str, folder: Path, clients: int, args: argparse.Namespace
) -> dict[str, float]:
    async with _running(name, folder, clients, args) as router:
        client, model = HttpTarget(router.url), router.model
        turns_of, path = (_ids_of, _COMPLETIONS) if args.token_ids else (_turns_of, _CHAT)
        answer = {"model": model, "max_tokens": 2 if args.engines else 1, "stream": True}
        chats = [turns_of(f"{i}", args.bytes, args.turns, answer) for i in range(clients)]
        found: dict[str, float] = {}
        try:
            warm_up = min(args.bytes, 20_000) if args.engines else args.bytes
            await _ask(client, model, path, [turns_of("warm-up", warm_up, 1, answer)])
            for kind, which in (("first", slice(1)), ("later", slice(1, None))):
                cpu_s, begun = processor_s([router.pid]), time.monotonic()
                ttfts_s = await _ask(client, model, path, [x[which] for x in chats])
                took_s, cpu_s = time.monotonic() - begun, processor_s([router.pid]) - cpu_s
                p50_s, p99_s = percentiles(ttfts_s, 50, 99)
                found |= {
                    f"{kind}: p50_ms": p50_s * 1e3,
                    f"{kind}: p99_ms": p99_s * 1e3,
                    f"{kind}: cpu_ms": cpu_s / len(ttfts_s) * 1e3,
                    f"{kind}: requests_per_s": len(ttfts_s) / took_s,
                }
            return found
        except TargetError as error:
            raise BenchError(f"{name} failed a request: {error}") from None
        except TimeoutError:
            raise BenchError(f"{name}: not finished after {TIMEOUT_S:g} s") from None
        finally:
            await client.aclose()


def _running(
    name: str, folder: Path, clients: int, args: argparse.Namespace
) -> AbstractAsyncContextManager[RunningRouter]:
    if args.engines:
        return _running_with_engines(name, folder, clients * args.bytes)
    blocks = clients * (2 + args.bytes // 16)
    worker = {"model": str(_model(args.model, folder)), "model_names": ["mock"]}
    engine = {"step_s": 0.001, "max_num_seqs": clients + 16, "total_blocks": blocks}
    return running(name, folder, engine, worker)


@asynccontextmanager
async def _running_with_engines(
    name: str, folder: Path, prompt_bytes: int
) -> AsyncIterator[RunningRouter]:
    """Run a prefill and a decode engine, one core each, whose caches have room for
    `prompt_bytes`."""
    model = _small_model(folder / "model")
    # Two layers with one head of 64 bfloat16: 512 bytes a token, of which there are fewer than
    # bytes of text.
    cache_bytes = max(256 << 20, 512 * prompt_bytes)
    changes = {
        "worker.model": str(model),
        "worker.model_names": [model.name],
        "worker.compilation": "eager",
        "worker.engine_args.kv_cache_memory_bytes": cache_bytes,
        "router.http.port": 0,
        "router.grpc.port": 0,
        "up.cores_per_worker": 1,
    }
    config = load_config(None, changes)
    started: LocalService | VllmStack
    if name == OURS:
        started = LocalService(name, to_mapping(config), folder / name)
    else:
        cores = sorted(os.sched_getaffinity(0))[:2]
        started = VllmStack(
            name, stack_config(STACKS["vllm-pd"], cores, config.worker), folder / name
        )
    try:
        await started.start()
        ready = started.ready
        yield RunningRouter(name, ready["http"], model.name, ready["router"]["pid"])
    finally:
        await started.stop()


def _small_model(target: Path) -> Path:
    """Write a model that is small, because attention to 50,000 tokens takes a core of a CPU a
    minute even so."""
    return make_model(
        target,
        model_directory("smollm2"),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 16,
    )


def _model(name: str, folder: Path) -> Path:
    """Return a model directory with a model's tokenizer and a context that is long enough."""
    try:
        source = model_directory(name)
    except ConfigError as error:
        raise BenchError(f"--model: {error}") from None
    values = json.loads((source / "config.json").read_bytes())
    values = values.get("text_config", values) | {"max_position_embeddings": MAX_MODEL_LEN}
    target = folder / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values), "utf-8")
    copy_tokenizer(source, target)
    return target


def _turns_of(name: str, size: int, turns: int, answer: Mapping[str, object]) -> list[bytes]:
    """Return the bodies of the turns of a chat, whose messages are random words. `answer`: their
    other fields. Built in advance, outside of the measured time."""
    chance = random.Random(name)
    messages: list[dict[str, str]] = []

    def say(role: str, size: int) -> None:
        text = " ".join(chance.choices(_WORDS.split(), k=size // 5))
        messages.append({"role": role, "content": text[:size].ljust(size, ".")})

    for _ in range(size // (NEW_BYTES + ANSWER_BYTES)):
        say("user", NEW_BYTES)
        say("assistant", ANSWER_BYTES)
    bodies = []
    for _ in range(turns):
        say("user", NEW_BYTES)
        body = {**answer, "messages": messages}
        bodies.append(json.dumps(body).encode())
        say("assistant", ANSWER_BYTES)
    return bodies


def _ids_of(name: str, size: int, turns: int, answer: Mapping[str, object]) -> list[bytes]:
    """Return the bodies of the turns of a conversation in random token ids."""
    chance, prompt = random.Random(name), list[int]()
    bodies = []
    for turn in range(turns):
        more = NEW_BYTES + ANSWER_BYTES if turn else size
        prompt += chance.choices(range(1000, 49_000), k=more // _BYTES_OF_ID)
        body = {**answer, "prompt": prompt}
        bodies.append(json.dumps(body).encode())
    return bodies


async def _ask(
    client: HttpTarget, model: str, path: str, chats: Iterable[Iterable[bytes]]
) -> list[float]:
    """Take the turns of all chats. Return the seconds from sending to the first token of each."""
    found: list[float] = []

    async def one(bodies: Iterable[bytes]) -> None:
        for body in bodies:
            request = Request("", model, body, path=path)
            begun, ttft_s = time.monotonic(), 0.0
            async for _ in client.stream(request):
                ttft_s = ttft_s or time.monotonic() - begun
            found.append(ttft_s)

    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*map(one, chats))
    return found
