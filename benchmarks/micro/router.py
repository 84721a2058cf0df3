"""Cost of a router for each streamed token and each request, compared with other routers.

pdserve's router serves one prefill and one decode worker with scripted engines, and each request
uses both. vllm-router (if on PATH) serves one equally fast mock server, and as `vllm-router-pd` one
for prefill and one for decode; so does smg, as `smg-pd`. `direct` is the mock server without a
router. CPU time is of the router's processes. A token's latency is from its engine step to its
arrival at the client. Idle streams are measured only with the first number of streams.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks.client import HttpTarget, Request
from benchmarks.errors import BenchError, TargetError
from benchmarks.service import LocalService, LoggedProcess, processor_s, with_children
from benchmarks.stats import alternate, compare, percentiles
from pdserve.deploy.local.groups import free_ports

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from benchmarks.progress import Progress

OURS, PEER, PEER_PD, DIRECT = "pdserve", "vllm-router", "vllm-router-pd", "direct"
SMG_PD: Final = "smg-pd"
_PROGRAMS: Final = {PEER: PEER, PEER_PD: PEER, SMG_PD: "smg"}
TIMEOUT_S: Final = 120.0
TOKENS_PER_S: Final = 6400  # over all streams; the limit of a Python client
TOKENS: Final = 32_768  # over all streams, but at least 128 per answer
ONE_TOKEN_REQUESTS: Final = 6000
IDLE_STREAMS: Final = 500
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_RATIOS: Final = ("cpu_us_per_token", "cpu_us_per_request")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", default="64,1000", metavar="N,...", help="at once (64,1000)")
    add_routers_option(parser)
    parser.add_argument("--quick", action="store_true", help="small: only shows that it works")


def add_routers_option(parser: argparse.ArgumentParser) -> None:
    every = f"{DIRECT},{OURS},{PEER},{PEER_PD},{SMG_PD}"
    parser.add_argument("--only", default=every, metavar="NAME,...", help="these routers")


def chosen_routers(only: str) -> tuple[list[str], list[str]]:
    """Return the names in the value of --only, and notes on routers that are left out, because they
    are not installed."""
    names, notes = [], []
    for name in only.split(","):
        program = _PROGRAMS.get(name)
        if program and shutil.which(program) is None:
            notes.append(f"{name}: {program} is not on PATH (`pip install {program}`)")
        else:
            names.append(name)
    return names, notes


async def run(
    args: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all routers in turn. Return rows and notes. Raises BenchError."""
    names, notes = chosen_routers(args.only)
    counts = [int(x) for x in args.streams.split(",")]
    scale = 0.05 if args.quick else 1.0

    async def measure(name: str, number: int) -> dict[int, dict[str, float]]:
        progress.step(f"round {number + 1} of {args.rounds}: {name}")
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
            return {
                streams: await _measure(name, Path(directory), streams, counts[0], scale)
                for streams in counts
            }

    # Without a warm-up round: each round starts its routers and warms them up itself.
    rounds = [x async for x in alternate(names, args.rounds, measure, warm_up=False)]
    baseline = PEER if PEER in names else names[0]
    rows: list[dict[str, Any]] = []
    for streams in counts:
        for name in names:
            row: dict[str, Any] = {"router": name, "streams": streams}
            for metric in rounds[0][name][streams]:
                values = [{n: x[n][streams][metric] for n in names} for x in rounds]
                row[metric], ratio = compare(values, baseline)[name]
                if metric in _RATIOS:
                    row[f"{metric}_ratio"] = ratio
            rows.append(row)
    return rows, [*notes, f"ratios are to {baseline}, round by round"]


@dataclass(frozen=True, slots=True)
class RunningRouter:
    name: str
    url: str
    model: str
    pid: int

    def memory_kib(self) -> float:
        return sum(x.memory_info().rss for x in with_children([self.pid])) / 1024


async def _measure(
    name: str, directory: Path, streams: int, first: int, scale: float
) -> dict[str, float]:
    most = max(streams, IDLE_STREAMS) + 16
    engine = {
        "step_s": streams / TOKENS_PER_S,
        "max_num_seqs": most,
        "total_blocks": max(4096, most * 512),
        "clock_text": True,
    }
    async with running(name, directory, engine) as router:
        client = HttpTarget(router.url)
        try:
            await _drive(client, router, streams, tokens=4)  # warm-up
            tokens = max(4, int(max(128, TOKENS / streams) * scale))
            cpu_s, _, latencies_s = await _drive(client, router, streams, tokens=tokens)
            p50_s, p99_s = percentiles(latencies_s, 50, 99)
            found = {
                "cpu_us_per_token": cpu_s / (streams * tokens) * 1e6,
                "p50_ms": p50_s * 1e3,
                "p99_ms": p99_s * 1e3,
            }
            turns = max(2, int(ONE_TOKEN_REQUESTS * scale / streams))
            cpu_s, seconds, _ = await _drive(client, router, streams, tokens=1, turns=turns)
            found["cpu_us_per_request"] = cpu_s / (streams * turns) * 1e6
            found["requests_per_s"] = streams * turns / seconds
            if streams == first:
                idle = max(16, int(IDLE_STREAMS * scale))
                found["idle_stream_kib"] = await _idle_kib(client, router, idle)
        finally:
            await client.aclose()
        return found


async def _idle_kib(client: HttpTarget, router: RunningRouter, count: int) -> float:
    before = router.memory_kib()
    begun = [asyncio.Event() for _ in range(count)]

    async def hold(event: asyncio.Event) -> None:
        async for _ in client.stream(_request(router, 2000)):
            event.set()

    tasks = [asyncio.create_task(hold(event)) for event in begun]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(event.wait() for event in begun))
        return (router.memory_kib() - before) / count
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _request(router: RunningRouter, tokens: int) -> Request:
    body = {
        "model": router.model,
        "messages": [{"role": "user", "content": "Say what time it is, again and again."}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    return Request("", router.model, json.dumps(body).encode(), path="/v1/chat/completions")


async def _drive(
    client: HttpTarget, router: RunningRouter, streams: int, *, tokens: int, turns: int = 1
) -> tuple[float, float, list[float]]:
    """Run `streams` concurrent streams of `turns` requests each. Return the router's CPU seconds,
    the duration, and the latency of every token. Raises BenchError if a token is missing.

    The text of each token is the time at which its engine step ended.
    """
    latencies_s: list[float] = []
    request = _request(router, tokens)

    async def one() -> None:
        for _ in range(turns):
            async for piece in client.stream(request):
                now = time.monotonic()
                latencies_s.extend(now - float(at) for at in piece.text.split())

    cpu_s, begun = processor_s([router.pid]), time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(one() for _ in range(streams)))
    except TimeoutError:
        raise BenchError(f"{router.name}: not finished after {TIMEOUT_S:g} s") from None
    except TargetError as error:
        raise BenchError(f"{router.name} failed a request: {error}") from None
    if len(latencies_s) != streams * tokens * turns:
        raise BenchError(f"{router.name}: {len(latencies_s)} tokens of {streams * tokens * turns}")
    return processor_s([router.pid]) - cpu_s, time.monotonic() - begun, latencies_s


@asynccontextmanager
async def running(
    name: str, directory: Path, engine: Mapping[str, Any], worker: Mapping[str, Any] = _NOTHING
) -> AsyncIterator[RunningRouter]:
    """Run a router and its workers until the context exits. `engine`: arguments of pdserve's fake
    engines; a mock server uses its `step_s`. `worker`: other configuration of pdserve's workers.
    Raises BenchError."""
    async with AsyncExitStack() as ending:
        if name == OURS:
            service = LocalService(name, _config(engine, worker), directory)
            ending.push_async_callback(service.stop)
            await service.start()
            ready = service.ready
            yield RunningRouter(name, ready["http"], ready["model"], ready["router"]["pid"])
            return

        async def start(what: str, port: int, *command: str) -> LoggedProcess:
            child = LoggedProcess(what, directory / f"{what}.log")
            ending.push_async_callback(child.stop)
            await child.start(command, lambda: _serves_the_mock(port))
            return child

        mocks: list[tuple[str, int]] = []
        for what in (
            ("prefill-server", "decode-server") if name in (PEER_PD, SMG_PD) else ("mock-server",)
        ):
            port = free_ports("127.0.0.1")
            module = (sys.executable, "-m", "benchmarks.micro.mock_server")
            mock = await start(what, port, *module, str(port), str(engine["step_s"]))
            mocks.append((f"http://127.0.0.1:{port}", mock.pid))
        if name == DIRECT:
            yield RunningRouter(name, mocks[0][0], "mock", mocks[0][1])
            return
        own = free_ports("127.0.0.1")
        command = [PEER] if name != SMG_PD else ["smg", "launch"]
        command += ["--host", "127.0.0.1", "--port", str(own), "--policy", "round_robin"]
        if name == PEER:
            command += ["--worker-urls", mocks[0][0]]
        else:
            option = "--vllm-pd-disaggregation" if name == PEER_PD else "--pd-disaggregation"
            command += [option, "--prefill", mocks[0][0], "--decode", mocks[1][0]]
        child = await start(name, own, *command, "--prometheus-port", str(free_ports("127.0.0.1")))
        yield RunningRouter(name, f"http://127.0.0.1:{own}", "mock", child.pid)


def _config(engine: Mapping[str, Any], worker: Mapping[str, Any]) -> dict[str, Any]:
    most = engine["max_num_seqs"]
    router = {
        "http": {"port": 0},
        "grpc": {"port": 0},
        "queue": {"max_running_requests": most, "max_queued_requests": max(1024, most)},
    }
    return {
        "router": router,
        "worker": {"engine": "fake", "engine_args": engine, **worker},
        "up": {},
    }


async def _serves_the_mock(port: int) -> bool:
    url, timeout = f"http://127.0.0.1:{port}/v1/models", aiohttp.ClientTimeout(total=5.0)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
            return b"mock" in await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
