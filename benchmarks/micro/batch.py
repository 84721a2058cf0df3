"""TTFT of interactive requests, alone and while a batch runs.

The service is 1P1D. Each round sends the same number of new prompts at random times (open loop) at
`--rate` per second: once alone, and once while a batch of `--lines` requests runs, which is then
cancelled. Reported are TTFT, the number of failed requests, and the batch's answered lines per
second.
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

from benchmarks.batches import BatchClient
from benchmarks.errors import BenchError, TargetError
from benchmarks.micro.serving import serving
from benchmarks.stats import alternate, percentiles

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.micro.serving import Serving
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
    """Return rows and notes. Raises BenchError."""
    async with AsyncExitStack() as ending:
        name = ending.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
        worker = {"model": args.model, "engine": args.engine}
        progress.step("starting 1P1D")
        starting = serving("1P1D", Path(name), worker, {"cores_per_worker": 1})
        served = await ending.enter_async_context(starting)
        batches = await ending.enter_async_context(BatchClient(served.ready["http"]))

        async def measure(variant: str, number: int) -> dict[str, float]:
            progress.step(f"round {number + 1} of {args.rounds}, {variant}")
            if variant == ALONE:
                return {**await _traffic(served, number, variant, args), "lines/s": 0.0}
            batch = await _begin(batches, served.model.name, args)
            try:
                before, begun = (await batches.get(batch))["request_counts"], time.perf_counter()
                figures = await _traffic(served, number, variant, args)
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
    served: Serving, number: int, variant: str, args: argparse.Namespace
) -> dict[str, float]:
    # Both variants of a round send at the same times, but with different prompts, so that no prefix
    # cache has them.
    moments, chance = random.Random(number), random.Random(f"{number}/{variant}")

    async def send(at_s: float, prompt: Sequence[int]) -> float | None:
        """Return the milliseconds to the first token, or None if the request failed."""
        await asyncio.sleep(at_s)
        try:
            return (await served.ask(prompt, args.tokens))[0][0]
        except TargetError:
            return None

    sent, at_s = [], 0.0
    for _ in range(args.requests):
        sent.append(send(at_s, served.prompt(chance, args.prompt)))
        at_s += moments.expovariate(args.rate)
    times = await asyncio.gather(*sent)
    ttfts = [x for x in times if x is not None]
    if not ttfts:
        raise BenchError("every request failed")
    p50, p99 = percentiles(ttfts, 50, 99)
    return {"ttft p50, ms": p50, "ttft p99, ms": p99, "failed": len(times) - len(ttfts)}


async def _begin(batches: BatchClient, model: str, args: argparse.Namespace) -> str:
    bodies = {}
    for number in range(args.lines):
        words = random.Random(f"{time.time_ns()}/{number}").choices(("a", "b", "c"), k=args.prompt)
        bodies[f"{number}"] = {"model": model, "prompt": " ".join(words), "max_tokens": args.tokens}
    return await batches.begin(bodies)
