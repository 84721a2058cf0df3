"""TTFT of interactive requests, alone and while a batch runs.

One 1P1D service. Each round sends the same number of fresh prompts at random moments, at `--rate` a
second whether or not earlier answers have arrived: once alone, and once after a batch of `--lines`
requests has begun, which is cancelled afterwards. Reported are TTFT, the requests that failed, and
the lines of the batch that were answered meanwhile in a second.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.batches import Batches
from benchmarks.client import GrpcTarget, exactly
from benchmarks.errors import BenchError, TargetError
from benchmarks.service import Service
from benchmarks.stats import alternate, percentiles

if TYPE_CHECKING:
    import argparse

    from benchmarks.client import Request, ServedModel
    from benchmarks.progress import Progress

ALONE, BESIDE = "alone", "beside a batch"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", metavar="DIR", help="a model directory, or demo")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="a round (100)")
    parser.add_argument("--rate", type=float, default=5.0, metavar="N", help="a second (5)")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="its tokens (128)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="an answer (32)")
    parser.add_argument("--lines", type=int, default=5000, metavar="N", help="of the batch (5000)")


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Raises BenchError."""
    async with AsyncExitStack() as ending:
        name = ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
        config = {
            "router": {"http_port": 0, "grpc_port": 0, "slo": {"reject_factor": 0.0}},
            "worker": {"model": args.model, "engine": args.engine},
            "up": {"cores_per_worker": 1},
        }
        progress.step("starting 1P1D")
        service = Service("1P1D", config, Path(name))
        ending.push_async_callback(service.stop)
        await service.start()
        target = GrpcTarget(service.ready["grpc"])
        ending.push_async_callback(target.aclose)
        batches = await ending.enter_async_context(Batches(service.ready["http"]))
        model = await target.model()

        async def measure(variant: str, number: int) -> dict[str, float]:
            progress.step(f"round {number + 1} of {args.rounds}, {variant}")
            if variant == ALONE:
                return {**await _traffic(target, model, number, variant, args), "lines/s": 0.0}
            batch = await _begin(batches, model.name, args)
            try:
                before, begun = (await batches.get(batch))["request_counts"], time.perf_counter()
                figures = await _traffic(target, model, number, variant, args)
                after = await batches.get(batch)
                if after["status"] != "in_progress":
                    raise BenchError(f"the batch is {after['status']} too early: more --lines")
                lines = after["request_counts"]["completed"] - before["completed"]
                return {**figures, "lines/s": lines / (time.perf_counter() - begun)}
            finally:
                await batches.cancel(batch)

        rounds = [x async for x in alternate([ALONE, BESIDE], args.rounds, measure)]
    rows = []
    for variant in (ALONE, BESIDE):
        found = [each[variant] for each in rounds]
        rows.append({"": variant, **{key: median(x[key] for x in found) for key in found[0]}})
    return rows, []


async def _traffic(
    target: GrpcTarget, model: ServedModel, number: int, variant: str, args: argparse.Namespace
) -> dict[str, float]:
    # The same moments in both variants of a round, but no prompt that a prefix cache has.
    moments, chance = random.Random(number), random.Random(f"{number}/{variant}")

    async def send(at_s: float, request: Request) -> float | None:
        """Return the milliseconds to the first token, None if the request failed."""
        await asyncio.sleep(at_s)
        begun, first = time.perf_counter(), None
        try:
            async for piece in target.stream(request):
                if first is None and piece.tokens:
                    first = (time.perf_counter() - begun) * 1e3
        except TargetError:
            return None
        return first

    sent, at_s = [], 0.0
    for _ in range(args.requests):
        prompt = [chance.randrange(16, model.vocab_size or 1000) for _ in range(args.prompt)]
        sent.append(send(at_s, target.prepare(model, "", prompt, exactly(args.tokens))))
        at_s += moments.expovariate(args.rate)
    times = await asyncio.gather(*sent)
    ttfts = [x for x in times if x is not None]
    if not ttfts:
        raise BenchError("every request failed")
    p50, p99 = percentiles(ttfts, 50, 99)
    return {"ttft p50, ms": p50, "ttft p99, ms": p99, "failed": len(times) - len(ttfts)}


async def _begin(batches: Batches, model: str, args: argparse.Namespace) -> str:
    bodies = {}
    for number in range(args.lines):
        words = random.Random(f"{time.time_ns()}/{number}").choices(("a", "b", "c"), k=args.prompt)
        bodies[f"{number}"] = {"model": model, "prompt": " ".join(words), "max_tokens": args.tokens}
    return await batches.begin(bodies)
