"""Processes that a benchmark starts: single commands, and whole services with `pdserve up`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import psutil
import yaml

from benchmarks.errors import BenchError
from pdserve import wire
from pdserve.net import rpc
from pdserve.process.gpus import is_cpu_build
from pdserve.security.local import admin_key
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pdserve.types import WorkerInfo
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
RPC_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 12
# prctl(PR_SET_PDEATHSIG, SIGTERM): the kernel terminates the child when this process ends, even if
# it is killed. exec keeps this setting.
_EXEC: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
)


class LoggedProcess:
    """A process in its own session. Its output is written to a file."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._session: int | None = None

    async def start(
        self,
        command: Sequence[str],
        is_ready: Callable[[], Awaitable[bool]],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command` with `env` added to our environment, and wait until it is ready. If it
        does not become ready, raise BenchError with the end of its log."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            # Not with asyncio, because its fork conflicts with gRPC's threads.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", _EXEC, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._session = self._process.pid
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await is_ready():
                    if not self.is_alive:
                        raise BenchError(f"{self.name} did not start:\n{self._tail()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            problem = f"{self.name} was not ready in {READY_TIMEOUT_S:g} s"
            raise BenchError(f"{problem}:\n{self._tail()}") from None

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """End the process. Kill it with its children if it does not end in time. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.send_signal(sign)
        try:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        finally:
            if process.poll() is None:  # the timeout has passed, or this task was cancelled
                for each in with_children([process.pid]):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait()

    def in_session(self) -> list[psutil.Process]:
        """Return the process and what it started, as long as they run, also if it has ended. A
        descendant that opened a session of its own is not in it."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self._session:
                    found.append(process)
        return [x for x in found if x.is_running() and x.status() != psutil.STATUS_ZOMBIE]

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id. Raises BenchError if the process has ended."""
        if self._process is None or not self.is_alive:
            raise BenchError(f"{self.name} ended:\n{self._tail()}")
        return self._process.pid

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def _of_one_kind(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with eager workers on a CPU, unless it says which. By default the first round
    would make compiled code meanwhile, and later rounds run it."""
    worker = config.get("worker", {})
    is_set = worker.get("compilation", "auto") != "auto" or "enforce_eager" in json.dumps(config)
    if is_set or not is_cpu_build():
        return config
    return {**config, "worker": {**worker, "compilation": "eager"}}


class LocalService:
    """A service started with `pdserve up`. Its files are in `directory`.

    `ready`: content of the ready file, empty while the service is not running. `config`: what it
    is started with. `environment` is added to ours.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.directory = directory
        self.ready: Mapping[str, Any] = {}
        self._environment = environment
        self._ready_path = directory / "ready.json"
        up = {**config["up"], "ready_file": str(self._ready_path), "run_dir": str(directory)}
        self.config = {**_of_one_kind(config), "up": up}
        self._child = LoggedProcess(name, directory / "up.log")
        self._channels = AsyncExitStack()
        self._registries: list[RegistryAsyncStub] = []

    async def start(self) -> None:
        """Start the service and wait until it is ready. Raises BenchError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config_path = self.directory / "up.yaml"
        config_path.write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")
        self._ready_path.unlink(missing_ok=True)

        async def is_ready() -> bool:
            return self._ready_path.exists()

        command = [sys.executable, "-m", "pdserve", "up", "--config", str(config_path)]
        await self._child.start(command, is_ready, self._environment)
        self.ready = self.read_ready()
        for router in self.ready["routers"]:
            channel = await self._channels.enter_async_context(rpc.open_channel(router["grpc"]))
            self._registries.append(RegistryStub(channel))

    @property
    def operator(self) -> rpc.Dialer:
        """A dialer with the administrator's key that `pdserve up` created."""
        return rpc.Dialer(token=admin_key(self.directory))

    async def stop(self) -> None:
        """Stop the service. Idempotent."""
        self.ready = {}
        await self._channels.aclose()
        await self._child.stop(signal.SIGINT)

    async def listed(self, router: int = 0) -> w.ListWorkersResponse:
        """Return a router's list of workers. Raises BenchError."""
        try:
            return await self._registries[router].ListWorkers(
                w.ListWorkersRequest(), timeout=RPC_TIMEOUT_S, metadata=self.operator.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise BenchError(f"{self.name} does not list its workers: {error.code()}") from None

    async def workers(self) -> list[WorkerInfo]:
        """Return the registration of each worker. Raises BenchError."""
        return [wire.worker_from_pb(entry.info) for entry in (await self.listed()).workers]

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    async def problem(self) -> str | None:
        """Return a description if a process ended or restarted since the service was ready, else
        None."""
        if not self.is_alive:
            return f"{self.name} ended"
        if not self._ready_path.exists() or self.read_ready() != self.ready:
            return f"a process of {self.name} died and was started again"
        return None

    def read_ready(self) -> Mapping[str, Any]:
        """Return the current content of the ready file. `pdserve up` rewrites it after a process
        has restarted."""
        content: Mapping[str, Any] = json.loads(self._ready_path.read_text(encoding="utf-8"))
        return content


def processor_s(pids: Iterable[int]) -> float:
    """Return the total CPU time of processes and their children, in seconds. Ended ones count 0."""
    total = 0.0
    for process in with_children(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return processes with all their descendants."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found
