"""What traces and metrics cost a service, router and workers together:

    python -m benchmarks.telemetry [--engine vllm|fake] [--rounds 6] [--tokens 1,64] [--json]

The same load, in turns within one run, on a service whose processes send spans to a collector
(`traces`), on one that sends none and whose metrics nobody reads (`off`), and on the latter while
the metrics of all its processes are read each second (`scraped`). CPU is that of router and workers
with their engines, the collector's and the client's not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.collector import collecting
from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from benchmarks.processes import processor_s
from benchmarks.report import stdout_console
from benchmarks.router.load import drive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ASK_S = 60.0
SCRAPE_PERIOD_S = 1.0
OFF, TRACES, SCRAPED = "off", "traces", "scraped"
ARMS = (OFF, TRACES, SCRAPED)


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` connections, each of which asks `requests` times for `tokens` tokens."""

    streams: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one arm: CPU milliseconds a request, the router's in microseconds."""

    arm: str
    tokens: int
    request_ms: float
    router_us: float
    requests_per_s: float


async def run(engine: str, loads: Sequence[Load], rounds: int) -> list[Sample]:
    """The rounds, a first one left out as warm-up. Raises BenchError."""
    async with AsyncExitStack() as ending:
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        endpoint = await ending.enter_async_context(collecting(directory))
        streams = max(load.streams for load in loads)
        plain = Stack("plain", _config(engine, streams, ""), directory / "plain")
        traced = Stack("traced", _config(engine, streams, endpoint), directory / "traced")
        for stack in (plain, traced):
            ending.push_async_callback(stack.stop)
            await stack.start()
        found = []
        for turn in range(rounds + 1):
            for load in loads:
                for arm in ARMS if turn % 2 else reversed(ARMS):
                    sample = await _round(arm, traced if arm == TRACES else plain, load)
                    found += [sample] if turn else []
        return found


async def _round(arm: str, stack: Stack, load: Load) -> Sample:
    assert stack.ready is not None
    pids = [stack.ready["router"]["pid"], *(worker["pid"] for worker in stack.ready["workers"])]
    address = str(stack.ready["http"]).removeprefix("http://")
    async with AsyncExitStack() as ending:
        if arm == SCRAPED:
            await ending.enter_async_context(_scraping(stack))
        before = [processor_s([pid]) for pid in pids]
        heard = await drive(
            address,
            stack.ready["model"],
            streams=load.streams,
            tokens=load.tokens,
            requests=load.requests,
        )
        used = [processor_s([pid]) - had for pid, had in zip(pids, before, strict=True)]
    if heard.failures:
        raise BenchError(f"{arm} failed a request: {heard.failures[0]}")
    count = load.streams * load.requests
    return Sample(
        arm,
        load.tokens,
        sum(used) / count * 1e3,
        used[0] / count * 1e6,
        count / heard.seconds,
    )


@asynccontextmanager
async def _scraping(stack: Stack) -> AsyncIterator[None]:
    """The metrics of all processes are read each second meanwhile."""
    assert stack.ready is not None
    said = [stack.ready["http"], *(worker["debug"] for worker in stack.ready["workers"])]
    urls = [f"http://{str(x).removeprefix('http://')}/metrics" for x in said]

    async def scrape() -> None:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            while True:
                for url in urls:
                    async with client.get(url) as answer:
                        await answer.read()
                await asyncio.sleep(SCRAPE_PERIOD_S)

    task = asyncio.create_task(scrape())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _config(engine: str, streams: int, endpoint: str) -> dict[str, Any]:
    args: dict[str, object] = {"max_num_seqs": streams}
    if engine == "fake":
        args |= {"step_s": 0.01, "total_blocks": 4096}
    faces = {"http_port": 0, "grpc_port": 0, "slo": {"refuse_beyond": 0.0}}
    return {
        "router": {**faces, "otlp_endpoint": endpoint, "detection": {"stall_s": 0}},
        "worker": {"engine": engine, "engine_args": args, "otlp_endpoint": endpoint},
        "up": {},
    }


def show(samples: Sequence[Sample]) -> None:
    """Medians, and over them the quotients with `off` of the same round."""
    table = Table(title="CPU of router and workers; medians over the rounds")
    for column in (
        *("tokens", "", "ms a request", "of off's", "its range"),
        *("router, µs a request", "requests/s", "of off's"),
    ):
        table.add_column(column, justify="right")
    for tokens in sorted({s.tokens for s in samples}):
        by_arm = {a: [s for s in samples if (s.arm, s.tokens) == (a, tokens)] for a in ARMS}
        for arm, found in by_arm.items():
            pairs = list(zip(found, by_arm[OFF], strict=True))
            cpu = [one.request_ms / off.request_ms for one, off in pairs]
            speed = [one.requests_per_s / off.requests_per_s for one, off in pairs]
            table.add_row(
                str(tokens),
                arm,
                f"{statistics.median(s.request_ms for s in found):.3f}",
                f"{statistics.median(cpu):.3f}",
                f"{min(cpu):.3f} to {max(cpu):.3f}",
                f"{statistics.median(s.router_us for s in found):.0f}",
                f"{statistics.median(s.requests_per_s for s in found):.1f}",
                f"{statistics.median(speed):.3f}",
            )
    stdout_console().print(table)


def main() -> int:
    """Exit status 0, or 2 where something cannot be measured here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", choices=("vllm", "fake"))
    parser.add_argument("--rounds", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=512, help="of a round (%(default)s)")
    parser.add_argument("--tokens", default="1,64", help="of an answer (%(default)s)")
    parser.add_argument("--json", action="store_true", help="every sample, as JSON")
    options = parser.parse_args()
    each = max(1, options.requests // options.streams)
    loads = [Load(options.streams, each, int(tokens)) for tokens in options.tokens.split(",")]
    try:
        samples = asyncio.run(run(options.engine, loads, options.rounds))
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(s) for s in samples]) + "\n")
    else:
        show(samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
