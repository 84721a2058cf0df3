"""The routers that are compared, each as processes of its own in front of equal workers.

Ours stands before one prefill and one decode worker with the scripted engine, so each request
crosses both; the others stand before one mock worker, which costs them less per request.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from benchmarks.collector import collecting
from benchmarks.compare.stack import Stack
from benchmarks.processes import Child, free_port, memory_bytes, processor_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

READY_S = 60.0
ASK_S = 5.0
DIRECT = "direct"
OURS = "pdserve"
# The same, its router and workers sending spans to a collector that throws them away.
TRACED = "pdserve, traced"
PEERS = ("vllm-router", "smg")


@dataclass(frozen=True, slots=True)
class Router:
    """Where it listens, what model it serves, and its process."""

    name: str
    address: str
    model: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds that the router's processes have used."""
        return processor_s([self.pid])

    def memory_bytes(self) -> int:
        """Resident memory of the router's processes."""
        return memory_bytes([self.pid])


def missing(name: str) -> str | None:
    """Why this router cannot be measured here, or None."""
    if name in PEERS and shutil.which(name) is None:
        return f"its command is not on PATH; `pip install {name}` brings it"
    return None


@asynccontextmanager
async def running(name: str, directory: Path, step_s: float, streams: int) -> AsyncIterator[Router]:
    """The router, ready; ended with its workers. Raises BenchError."""
    async with AsyncExitStack() as ending:
        if name in (OURS, TRACED):
            endpoint = ""
            if name == TRACED:
                endpoint = await ending.enter_async_context(collecting(directory))
            stack = Stack("pdserve", _config(step_s, streams, endpoint), directory)
            ending.push_async_callback(stack.stop)
            await stack.start()
            assert stack.ready is not None
            address = str(stack.ready["http"]).removeprefix("http://")
            yield Router(name, address, stack.ready["model"], stack.ready["router"]["pid"])
            return
        worker = Child("the mock worker", directory / "mock.log")
        ending.push_async_callback(worker.stop)
        port = await _start_mock_worker(worker, directory / "mock.port", step_s)
        if name == DIRECT:
            yield Router(name, f"127.0.0.1:{port}", "mock", worker.pid)
            return
        own = free_port()
        verb = ["launch"] if name == "smg" else []
        child = Child(name, directory / f"{name}.log")
        ending.push_async_callback(child.stop)
        child.start(
            [
                *(name, *verb, "--host", "127.0.0.1", "--port", str(own)),
                *("--policy", "round_robin", "--worker-urls", f"http://127.0.0.1:{port}"),
                *("--prometheus-port", str(free_port())),
            ]
        )
        await child.until(lambda: _serves_the_mock(own), READY_S)
        yield Router(name, f"127.0.0.1:{own}", "mock", child.pid)


def _config(step_s: float, streams: int, endpoint: str) -> dict[str, object]:
    engine = {
        "step_s": step_s,
        "max_num_seqs": streams + 16,
        "total_blocks": max(4096, streams * 512),
        "clock_text": True,
    }
    return {
        "router": {
            "http_port": 0,
            "grpc_port": 0,
            "max_running_requests": streams + 16,
            "max_queued_requests": max(1024, streams),
            "slo": {"refuse_beyond": 0.0},
            "otlp_endpoint": endpoint,
        },
        "worker": {"engine": "fake", "engine_args": engine, "otlp_endpoint": endpoint},
        "up": {},
    }


async def _start_mock_worker(worker: Child, port_file: Path, step_s: float) -> int:
    module = "benchmarks.router.mock_worker"
    command = [sys.executable, "-m", module, "--port-file", str(port_file)]
    worker.start([*command, "--step-s", str(step_s)])
    await worker.until_file(port_file, READY_S)
    return int(await asyncio.to_thread(port_file.read_text, encoding="ascii"))


async def _serves_the_mock(port: int) -> bool:
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"http://127.0.0.1:{port}/v1/models") as answer,
        ):
            return b"mock" in await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
