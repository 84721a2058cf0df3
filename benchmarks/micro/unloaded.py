"""One request at a time through 1P1D and through one aggregated engine, in turns.

Both are `pdserve up` with one core a worker and the same settings. Each round sends both the same
fresh prompt. Reported are medians, and the median of the rounds' ratios of 1P1D to 1A. TPOT2 is
TPOT from the second token on, so without the hand-off.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.cli import run_async
from benchmarks.client import GrpcTarget
from benchmarks.errors import BenchError, TargetError
from benchmarks.runner import alternate, compare
from benchmarks.service import Service

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from benchmarks.client import ServedModel
    from benchmarks.progress import Progress

OURS, BASELINE = "1P1D", "1A"
WORKERS: Final[Mapping[str, Mapping[str, int]]] = {
    OURS: {"prefill": 1, "decode": 1, "aggregated": 0},
    BASELINE: {"prefill": 0, "decode": 0, "aggregated": 1},
}
METRICS: Final = ("ttft_ms", "tt2t_ms", "tpot_ms", "tpot2_ms", "e2e_ms")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="demo or a model directory")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--lengths", default="128,512,2048", metavar="N,...", help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=129, metavar="N", help="an answer (129)")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="of each engine (512)")


def run(args: argparse.Namespace, progress: Progress) -> tuple[list[dict[str, Any]], list[str]]:
    """Raises BenchError."""
    if args.tokens < 3:
        raise BenchError("--tokens must be 3 or more")
    rows: list[dict[str, Any]] = run_async(_run(args, progress))
    return rows, []


async def _run(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        targets: dict[str, GrpcTarget] = {}
        for name in WORKERS:
            progress.step(f"starting {name}")
            service = Service(name, _config(name, args), directory / name)
            ending.push_async_callback(service.stop)
            await service.start()
            assert service.ready is not None
            targets[name] = GrpcTarget(service.ready["grpc"])
            ending.push_async_callback(targets[name].aclose)
        model = await targets[OURS].model(None)
        return [
            await _measure(targets, model, length, args, progress)
            for length in map(int, args.lengths.split(","))
        ]


def _config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    engine: dict[str, Any] = {"max_num_seqs": 64}
    if args.engine == "vllm":
        engine["kv_cache_memory_bytes"] = args.kv_cache_mib << 20
    router = {
        "http_port": 0,
        "grpc_port": 0,
        "policy": "least_loaded",  # hands every prompt over
        "slo": {"reject_factor": 0.0},
    }
    worker = {"model": args.model, "engine": args.engine, "engine_args": engine}
    return {"router": router, "worker": worker, "up": {"cores_per_worker": 1, **WORKERS[name]}}


async def _measure(
    targets: Mapping[str, GrpcTarget],
    model: ServedModel,
    length: int,
    args: argparse.Namespace,
    progress: Progress,
) -> dict[str, Any]:
    moved: list[float] = []

    async def measure(name: str, number: int) -> dict[str, float]:
        progress.step(f"{length} tokens, round {number + 1} of {args.rounds}, {name}")
        chance = random.Random(f"{length}/{number}")
        prompt = [chance.randrange(16, model.vocab_size or 1000) for _ in range(length)]
        request = targets[name].prepare(model, "", prompt, args.tokens)
        begun, at = time.perf_counter(), []
        try:
            async for piece in targets[name].stream(request):
                at += [(time.perf_counter() - begun) * 1e3] * (piece.tokens or 0)
                if piece.receipt is not None and name == OURS:
                    moved.append(float(piece.receipt["transfer_bytes"]))
        except TargetError as error:
            raise BenchError(f"{name}: {error}") from None
        if len(at) != args.tokens:
            raise BenchError(f"{name}: {len(at)} tokens instead of {args.tokens}")
        return {
            "ttft_ms": at[0],
            "tt2t_ms": at[1] - at[0],
            "tpot_ms": (at[-1] - at[0]) / (len(at) - 1),
            "tpot2_ms": (at[-1] - at[1]) / (len(at) - 2),
            "e2e_ms": at[-1],
        }

    rounds = [found async for _, found in alternate(list(WORKERS), args.rounds, measure)]
    row: dict[str, Any] = {"prompt_tokens": length}
    for metric in METRICS:
        found = compare([{n: x[n][metric] for n in WORKERS} for x in rounds], BASELINE, metric)
        row[f"{metric} {OURS}"] = found[OURS].median.value
        row[f"{metric} {BASELINE}"] = found[BASELINE].median.value
        quotient = found[OURS].ratio
        row[f"{metric} ratio"] = None if quotient is None else quotient.value
    row["kv_mib"] = moved[-1] / 2**20 if moved else 0.0
    return row
