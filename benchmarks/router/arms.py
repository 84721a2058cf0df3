"""The routers that are compared, each as processes of its own in front of equal workers.

Ours stands before one prefill and one decode worker with the scripted engine, so each request
crosses both; the others stand before one mock worker, which costs them less per request.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

READY_S = 60.0
STOP_S = 30.0
DIRECT = "direct"
OURS = "pdserve"
PEERS = ("vllm-router", "smg")


@dataclass(frozen=True, slots=True)
class Router:
    """Where it listens, what model it serves, and its process."""

    name: str
    address: str
    model: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds that the router's processes have used."""
        times = [p.cpu_times() for p in self._processes()]
        return sum(t.user + t.system for t in times)

    def memory_bytes(self) -> int:
        """Resident memory of the router's processes."""
        return sum(int(p.memory_info().rss) for p in self._processes())

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def missing(name: str) -> str | None:
    """Why this router cannot be measured here, or None."""
    if name in PEERS and shutil.which(name) is None:
        return f"its command is not on PATH; `pip install {name}` brings it"
    return None


@contextmanager
def running(name: str, directory: Path, step_s: float, streams: int) -> Iterator[Router]:
    """The router, ready; ended with its workers by their own process ids."""
    with ExitStack() as stack:
        if name == OURS:
            yield _ours(stack, directory, step_s, streams)
            return
        worker, port = _mock_worker(stack, directory, step_s)
        if name == DIRECT:
            yield Router(name, f"127.0.0.1:{port}", "mock", worker)
            return
        own = _free_port()
        verb = ["launch"] if name == "smg" else []
        command = [
            *(name, *verb, "--host", "127.0.0.1", "--port", str(own), "--policy", "round_robin"),
            *("--worker-urls", f"http://127.0.0.1:{port}", "--prometheus-port", str(_free_port())),
        ]
        process = _start(stack, command, directory / f"{name}.log")
        _wait_for_models(name, own)
        yield Router(name, f"127.0.0.1:{own}", "mock", process)


def _ours(stack: ExitStack, directory: Path, step_s: float, streams: int) -> Router:
    ready = directory / "ready.json"
    blocks = max(4096, streams * 512)
    engine = f"{{step_s: {step_s}, max_num_seqs: {streams + 16}, total_blocks: {blocks}"
    command = [
        *(sys.executable, "-m", "pdserve", "up", "--engine", "fake"),
        *("--set", f"worker.engine_args={engine}, clock_text: true}}"),
        *("--set", f"router.max_running_requests={streams + 16}"),
        *("--set", f"router.max_queued_requests={max(1024, streams)}"),
        *("--http-port", "0", "--grpc-port", "0"),
        *("--ready-file", str(ready), "--run-dir", str(directory / "run")),
    ]
    process = _start(stack, command, directory / "pdserve.log")
    _wait(OURS, process, ready)
    found = json.loads(ready.read_text(encoding="utf-8"))
    address = str(found["http"]).removeprefix("http://")
    return Router(OURS, address, "pdserve-demo", psutil.Process(found["router"]["pid"]))


def _mock_worker(stack: ExitStack, directory: Path, step_s: float) -> tuple[psutil.Process, int]:
    port_file = directory / "mock.port"
    port_file.unlink(missing_ok=True)
    module = "benchmarks.router.mock_worker"
    command = [sys.executable, "-m", module, "--port-file", str(port_file)]
    process = _start(stack, [*command, "--step-s", str(step_s)], directory / "mock.log")
    _wait("the mock worker", process, port_file)
    return process, int(port_file.read_text(encoding="ascii"))


def _start(stack: ExitStack, command: Sequence[str], log: Path) -> psutil.Process:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    stack.callback(_stop, process)
    return psutil.Process(process.pid)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)


def _wait(name: str, process: psutil.Process, sign: Path) -> None:
    end = time.monotonic() + READY_S
    while not sign.exists():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise BenchError(f"{name} did not start")
        if time.monotonic() > end:
            raise BenchError(f"{name} was not ready in {READY_S:g} s")
        time.sleep(0.02)


def _wait_for_models(name: str, port: int) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                if b"mock" in answer.read():
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.1)
    raise BenchError(f"{name} was not ready in {READY_S:g} s")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
