"""Routers and workers in their own processes, so that a test can kill or freeze them."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import signal
import sys
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.net import rpc
from pdserve.process.forkserver import ForkServer, launched
from pdserve.process.gpus import is_cpu_build
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from tests.support.commands import ROOT
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pdserve.process.forkserver import Process

_LOG = Path("/dev/stderr")
_SHIM = "tests.gpu.shim.preload"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@functools.cache
def _vllm_server() -> ForkServer:
    """Start a process that has imported vLLM, as `pdserve up` does."""
    server = ForkServer("tests.support.vllm_imported:preload")
    atexit.register(server.close)
    return server


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that finds the modules of this checkout."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **changes}


async def start_python(
    module: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    fds: Sequence[int] = (),
) -> Process:
    """Run `python -m module *args` with `env` added to the environment, in a process that has
    imported vLLM; on a GPU in a new one, because CUDA does not survive a fork. The descriptors
    `fds` are its last arguments."""
    whole = _environment(env or {})
    if is_cpu_build() or _SHIM in sys.modules:
        return await _vllm_server().start(module, *args, env=whole, log=log, fds=fds)
    command = [sys.executable, "-m", module, *args, *map(str, fds)]
    with log.open("ab") if log else nullcontext(None) as out:
        return await asyncio.create_subprocess_exec(
            *command,
            env=whole,
            stdout=out,
            stderr=out,
            pass_fds=fds,
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process and its reports."""

    process: Process
    reports: asyncio.StreamReader

    async def report(self, kind: str) -> Any:
        """Return the next report of this kind."""
        async with asyncio.timeout(START_S):
            while line := await self.reports.readline():
                message = json.loads(line)
                if kind in message:
                    return message[kind]
        raise AssertionError(f"the process ended without saying {kind}")

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.kill()
        await self.exit_code()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP: it does nothing until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the process go on with SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def end(self) -> int:
        """Send SIGTERM if it still runs, and return the exit code. A frozen process goes on."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            self.thaw()
        return await self.exit_code()


@dataclass(frozen=True, slots=True)
class RouterProcess(RunningProcess):
    """A router's process and its addresses."""

    http: str
    grpc: str


@asynccontextmanager
async def router_process(**options: object) -> AsyncIterator[RouterProcess]:
    """Run `pdserve router` with the configuration `options`. End it at the exit if it still
    runs."""
    settings = {"http.port": 0, "grpc.port": 0, "stop_grace_s": 0, "lease_s": 60, **options}
    settings["health.stall_s"] = 60  # a test may freeze a worker without a failure
    async with _process("router", settings) as running:
        ready = await running.report("ready")
        yield RouterProcess(running.process, running.reports, ready["http"], ready["grpc"])


async def until_workers(address: str, count: int) -> None:
    """Wait until this many workers are ready at the router."""
    async with rpc.open_channel(address) as channel:
        stub = RegistryStub(channel)

        async def are_ready() -> bool:
            listed = await stub.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
            return [x.state for x in listed.workers].count("ready") == count

        await wait_until(are_ready)


@asynccontextmanager
async def worker_process(**options: object) -> AsyncIterator[RunningProcess]:
    """Run `pdserve worker` with the configuration `options`, by default with a fake engine. It
    waits for its routers. One with vLLM is forked from a process that has imported it."""
    async with _process("worker", {"engine": "fake", **options}) as running:
        yield running


@asynccontextmanager
async def _process(kind: str, settings: dict[str, Any]) -> AsyncIterator[RunningProcess]:
    texts = {key: x if isinstance(x, str) else json.dumps(x) for key, x in settings.items()}
    values = [x for key, text in texts.items() for x in ("--set", f"{kind}.{key}={text}")]
    server = _vllm_server() if settings.get("engine") == "vllm" else None
    env = _environment(_ONE_THREAD if server else {})
    started = launched(server, "pdserve", kind, *values, env=env, log=_LOG)
    async with started as (process, reports):
        running = RunningProcess(process, reports)
        yield running
        await running.end()
