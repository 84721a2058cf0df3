"""The cost of a router for each streamed token and each request, beside other routers.

pdserve's router stands before one prefill and one decode worker with scripted engines, so each
request crosses both. vllm-router and smg (if on PATH) stand before one equally fast mock server.
`direct` is the mock server without a router. CPU is that of the router's processes; a latency is
from the engine step that made a token to its arrival at the client.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp

from benchmarks.cli import run_async
from benchmarks.errors import BenchError
from benchmarks.runner import alternate, compare
from benchmarks.service import Child, Service, free_port, processor_s, with_children
from benchmarks.stats import percentile

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from benchmarks.progress import Progress

OURS, PEERS, DIRECT = "pdserve", ("vllm-router", "smg"), "direct"
READY_S: Final = 60.0
TIMEOUT_S: Final = 120.0
TOKENS_PER_S: Final = 6400  # over all streams; a client in Python cannot read more
TOKENS: Final = 256
ONE_TOKEN_REQUESTS: Final = 1500
IDLE_STREAMS: Final = 500
METRICS: Final = {
    "cpu_us_per_token": "CPU of the router for each streamed token",
    "cpu_us_per_request": "CPU of the router for a request of one token",
    "p50_ms": "latency of a token",
    "p99_ms": "latency of a token",
    "requests_per_s": "requests of one token",
    "idle_stream_kib": "memory of the router for each open stream",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", default="64", metavar="N,...", help="at once (64)")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="an answer (256)")
    parser.add_argument("--only", metavar="NAME,...", help="these routers")
    parser.add_argument("--quick", action="store_true", help="small: only shows that it works")


def run(args: argparse.Namespace, progress: Progress) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all routers in turns. Raises BenchError."""
    names, notes = [], []
    for name in (DIRECT, OURS, *PEERS):
        if args.only and name not in args.only.split(","):
            continue
        if name in PEERS and shutil.which(name) is None:
            notes.append(f"{name} is not on PATH (`pip install {name}`)")
        else:
            names.append(name)
    baseline = PEERS[0] if PEERS[0] in names else names[0]
    rows: list[dict[str, Any]] = []
    for streams in map(int, args.streams.split(",")):
        rounds = run_async(_rounds(names, streams, args, progress))
        compared = {
            metric: compare([{n: x[n][metric] for n in names} for x in rounds], baseline, metric)
            for metric in METRICS
        }
        for name in names:
            row: dict[str, Any] = {"router": name, "streams": streams}
            for metric in METRICS:
                row[metric] = compared[metric][name].median.value
            for metric in ("cpu_us_per_token", "cpu_us_per_request"):
                found = compared[metric][name].ratio
                row[f"{metric}_ratio"] = None if found is None else found.value
            rows.append(row)
    notes.append(f"ratios are to {baseline}, round by round")
    return rows, notes


async def _rounds(
    names: list[str], streams: int, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Mapping[str, float]]]:
    async def measure(name: str, number: int) -> Mapping[str, float]:
        progress.step(f"round {number + 1} of {args.rounds}: {name}, {streams} streams")
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
            async with _running(name, Path(directory), streams) as router:
                return await _measure(router, streams, args.tokens, 0.05 if args.quick else 1.0)

    # Each round starts its routers anew and warms them up itself.
    return [found async for _, found in alternate(names, args.rounds, measure, warm_up=False)]


@dataclass(frozen=True, slots=True)
class _Router:
    name: str
    address: str
    model: str
    pid: int

    def cpu_s(self) -> float:
        return processor_s([self.pid])

    def memory_kib(self) -> float:
        return sum(x.memory_info().rss for x in with_children([self.pid])) / 1024


async def _measure(router: _Router, streams: int, tokens: int, scale: float) -> dict[str, float]:
    tokens = max(4, int(tokens * scale))
    turns = max(2, int(ONE_TOKEN_REQUESTS * scale / streams))
    idle = max(16, int(IDLE_STREAMS * scale))
    await _drive(router, streams=streams, tokens=4)  # warm-up
    before = router.cpu_s()
    heard = await _drive(router, streams=streams, tokens=tokens)
    token_us = (router.cpu_s() - before) / (streams * tokens) * 1e6
    before = router.cpu_s()
    short = await _drive(router, streams=streams, tokens=1, requests=turns)
    request_us = (router.cpu_s() - before) / (streams * turns) * 1e6
    kib = router.memory_kib()
    held = [await _connect(router, 2000, 1, _Heard()) for _ in range(idle)]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(stream.begun.wait() for stream in held))
    stream_kib = (router.memory_kib() - kib) / idle
    for stream in held:
        stream.close()
    return {
        "cpu_us_per_token": token_us,
        "cpu_us_per_request": request_us,
        "p50_ms": percentile(heard.latencies_s, 50) * 1e3,
        "p99_ms": percentile(heard.latencies_s, 99) * 1e3,
        "requests_per_s": streams * turns / short.seconds,
        "idle_stream_kib": stream_kib,
    }


# -- routers


@asynccontextmanager
async def _running(name: str, directory: Path, streams: int) -> AsyncIterator[_Router]:
    """Start a router and its workers, and end them. Raises BenchError."""
    step_s, most = streams / TOKENS_PER_S, max(streams, IDLE_STREAMS) + 16
    async with AsyncExitStack() as ending:
        if name == OURS:
            service = Service("pdserve", _config(step_s, most), directory)
            ending.push_async_callback(service.stop)
            await service.start()
            ready = service.ready
            assert ready is not None
            address = str(ready["http"]).removeprefix("http://")
            yield _Router(name, address, ready["model"], ready["router"]["pid"])
            return
        mock = Child("the mock server", directory / "mock.log")
        ending.push_async_callback(mock.stop)
        port = free_port()
        mock.start([sys.executable, "-m", "benchmarks.micro.mock_server", str(port), str(step_s)])
        await mock.until(lambda: _serves_the_mock(port), READY_S)
        if name == DIRECT:
            yield _Router(name, f"127.0.0.1:{port}", "mock", mock.pid)
            return
        own = free_port()
        child = Child(name, directory / f"{name}.log")
        ending.push_async_callback(child.stop)
        child.start(
            [
                *(name, *(["launch"] if name == "smg" else []), "--host", "127.0.0.1"),
                *("--port", str(own), "--policy", "round_robin"),
                *("--worker-urls", f"http://127.0.0.1:{port}"),
                *("--prometheus-port", str(free_port())),
            ]
        )
        await child.until(lambda: _serves_the_mock(own), READY_S)
        yield _Router(name, f"127.0.0.1:{own}", "mock", child.pid)


def _config(step_s: float, most: int) -> dict[str, Any]:
    engine = {
        "step_s": step_s,
        "max_num_seqs": most,
        "total_blocks": max(4096, most * 512),
        "clock_text": True,
    }
    router = {
        "http_port": 0,
        "grpc_port": 0,
        "max_running_requests": most,
        "max_queued_requests": max(1024, most),
        "slo": {"reject_factor": 0.0},
    }
    return {"router": router, "worker": {"engine": "fake", "engine_args": engine}, "up": {}}


async def _serves_the_mock(port: int) -> bool:
    timeout = aiohttp.ClientTimeout(total=5.0)
    url = f"http://127.0.0.1:{port}/v1/models"
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
            return b"mock" in await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


# -- the client: raw connections, because it shares the cores with what it measures

_TIMES: Final = re.compile(rb'"content":\s?"((?:[0-9]+\.[0-9]+ ?)+)"')


@dataclass(slots=True)
class _Heard:
    tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _Stream(asyncio.Protocol):
    """One connection that sends `requests` requests one after the other.

    The text of each token is the time at which its engine step ended.
    """

    def __init__(self, request: bytes, requests: int, heard: _Heard) -> None:
        self._request, self._left, self._heard = request, requests, heard
        self._rest = b""
        self._transport: asyncio.Transport
        self.begun, self.done = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        data, self._rest = data[:cut], data[cut:]
        times = [float(t) for found in _TIMES.findall(data) for t in found.split()]
        self._heard.tokens += len(times)
        self._heard.latencies_s += [now - t for t in times]
        if times:
            self.begun.set()
        if b"data: [DONE]" in data:
            self._left -= 1
            self._rest = b""
            if self._left:
                self._transport.write(self._request)
            else:
                self.done.set()
                self._transport.close()
        elif b'data: {"error"' in data or (
            data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200")
        ):
            self._fail(data[:800].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")

    def _fail(self, reason: str) -> None:
        if not self.done.is_set():
            self._heard.failures.append(reason)
            self.done.set()
            self.begun.set()
            self._transport.close()

    def close(self) -> None:
        self.done.set()
        self._transport.abort()


async def _connect(router: _Router, tokens: int, requests: int, heard: _Heard) -> _Stream:
    body = json.dumps(
        {
            "model": router.model,
            "messages": [{"role": "user", "content": "Say what time it is, again and again."}],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {router.address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, _, port = router.address.rpartition(":")
    request = (head + body).encode()
    _, stream = await asyncio.get_running_loop().create_connection(
        lambda: _Stream(request, requests, heard), host, int(port)
    )
    return stream


async def _drive(router: _Router, *, streams: int, tokens: int, requests: int = 1) -> _Heard:
    """Run all streams to their end. Raises BenchError if a token is missing."""
    heard = _Heard()
    opened = [await _connect(router, tokens, requests, heard) for _ in range(streams)]
    begun = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(stream.done.wait() for stream in opened))
    except TimeoutError:
        heard.failures.append(f"no end in {TIMEOUT_S:g} s")
    heard.seconds = time.monotonic() - begun
    if heard.failures:
        raise BenchError(f"{router.name} failed a request: {heard.failures[0]}")
    if heard.tokens != streams * tokens * requests:
        raise BenchError(f"{router.name}: {heard.tokens} tokens of {streams * tokens * requests}")
    return heard
