"""Prints what routers cost for each streamed token, each request and each open stream:

    python -m benchmarks.router [--rounds N] [--streams 64,1000] [--tokens N] [--otlp] [--json]
                                [--quick]

The routers take turns within a run, so that what else the machine does strikes them alike. CPU is
the router's processes' own; a latency is from the step that made a token to the client's reading of
it, so a worker without a router in between (`direct`) is the floor. `client` is the share of a core
that this process used itself: near 1 it is the client that is measured. Requests a second are those
of as many connections as there are streams, each of which asks anew once it was answered; a worker
takes up to two of its steps for an answer of one token, so that bounds them too.

A token's CPU has its share of its request's start. Answers are of 256 tokens with 64 streams and of
64 with 1,000, which is over sooner; `--streams 1000 --tokens 256` takes a minute a router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchError
from benchmarks.router import arms
from benchmarks.router.load import drive, hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.router.arms import Router
    from benchmarks.router.load import Heard
from benchmarks.report import stdout_console

# At 1,000 streams a token per 10 ms is more than one client in Python can read.
TOKENS_PER_S = 6400
# An answer of this with 64 streams, and shorter ones with more, so that a round ends in time.
TOKENS, FEWEST_TOKENS = 256, 32
ONE_TOKEN_REQUESTS, FEWEST_TURNS = 1500, 2
IDLE_STREAMS = 500


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one router. `token_us` and `request_us` are CPU, the latencies are times."""

    router: str
    streams: int
    token_us: float
    p50_ms: float
    p99_ms: float
    request_us: float
    requests_per_s: float
    stream_kib: float
    client: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where something cannot be measured here."""
    options = _parser().parse_args(arguments)
    err = Console(stderr=True)
    gone = {name: why for name in arms.PEERS if (why := arms.missing(name)) is not None}
    for name, why in gone.items():
        err.print(f"{name} is left out: {why}")
    ours = [arms.OURS, arms.TRACED] if options.otlp else [arms.OURS]
    names = [n for n in (arms.DIRECT, *ours, *arms.PEERS) if n not in gone]
    counts = [int(x) for x in options.streams.split(",")]
    scale = 0.05 if options.quick else 1.0
    samples: list[Sample] = []
    try:
        for turn in range(options.rounds):
            for streams in counts:
                for name in names if turn % 2 else reversed(names):
                    found = measure(name, streams, scale, tokens=options.tokens)
                    samples.append(asyncio.run(found))
                    err.print(f"round {turn + 1} of {options.rounds}: {name}, {streams} streams")
    except BenchError as error:
        err.print(f"error: {error}", markup=False)
        return 2
    if options.json:
        sys.stdout.write(json.dumps([asdict(s) for s in samples]) + "\n")
    else:
        _print(samples)
    return 0


async def measure(name: str, streams: int, scale: float, *, tokens: int | None = None) -> Sample:
    """One round: starts the router, warms it up, and takes all figures. An answer has `tokens`, or
    as many as are fit for so many streams."""
    step_s, most = streams / TOKENS_PER_S, max(streams, IDLE_STREAMS)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        async with arms.running(name, Path(directory), step_s, most) as router:
            length = tokens or min(TOKENS, max(FEWEST_TOKENS, TOKENS * 64 // streams))
            return await _measure(router, streams, scale, length)


async def _measure(router: Router, streams: int, scale: float, length: int) -> Sample:
    address, model = router.address, router.model
    tokens, turns = (
        max(4, int(length * scale)),
        max(FEWEST_TURNS, int(ONE_TOKEN_REQUESTS * scale / streams)),
    )
    _check(router, await drive(address, model, streams=streams, tokens=4))
    before, own = router.cpu_s(), time.process_time()
    heard = await drive(address, model, streams=streams, tokens=tokens)
    token_us = (router.cpu_s() - before) / (streams * tokens) * 1e6
    client = (time.process_time() - own) / heard.seconds
    _check(router, heard, streams * tokens)
    before = router.cpu_s()
    short = await drive(address, model, streams=streams, tokens=1, requests=turns)
    request_us = (router.cpu_s() - before) / (streams * turns) * 1e6
    _check(router, short, streams * turns)
    before = router.memory_bytes()
    idle = max(16, int(IDLE_STREAMS * scale))
    held = await hold(address, model, streams=idle, tokens=2000)
    stream_kib = (router.memory_bytes() - before) / idle / 1024
    held.close()
    late = sorted(heard.latencies_s)
    return Sample(
        router.name,
        streams,
        token_us,
        statistics.median(late) * 1e3,
        late[int(len(late) * 0.99)] * 1e3,
        request_us,
        streams * turns / short.seconds,
        stream_kib,
        client,
    )


def _check(router: Router, heard: Heard, tokens: int | None = None) -> None:
    if heard.failures:
        raise BenchError(f"{router.name} failed a request: {heard.failures[0]}")
    if tokens is not None and heard.tokens != tokens:
        raise BenchError(f"{router.name} brought {heard.tokens} of {tokens} tokens")


def _print(samples: Sequence[Sample]) -> None:
    table = Table(title="Medians over the rounds")
    for column in (
        *("router", "streams", "CPU µs/token", "p50 ms", "p99 ms"),
        *("CPU µs/request", "requests/s", "KiB/idle stream", "client"),
    ):
        table.add_column(column, justify="left" if column == "router" else "right")
    for streams in sorted({s.streams for s in samples}):
        for name in dict.fromkeys(s.router for s in samples):
            found = [s for s in samples if (s.router, s.streams) == (name, streams)]
            table.add_row(
                name,
                str(streams),
                *(
                    f"{statistics.median(getattr(s, figure) for s in found):.{digits}f}"
                    for figure, digits in (
                        *(("token_us", 1), ("p50_ms", 2), ("p99_ms", 2), ("request_us", 0)),
                        *(("requests_per_s", 0), ("stream_kib", 1), ("client", 2)),
                    )
                ),
            )
    stdout_console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="64,1000", help="numbers of streams at once")
    parser.add_argument("--tokens", type=int, help="tokens of an answer, for all streams alike")
    parser.add_argument("--otlp", action="store_true", help="ours once more, with spans sent")
    parser.add_argument("--json", action="store_true", help="every sample, as JSON")
    parser.add_argument("--quick", action="store_true", help="only shows that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
