"""`pdserve up` from its first process to its last.

A process that dies before all are ready ends everything, because a restart would fail the same
way. Later, one that was told to end is restarted at once, and one that dies is restarted after a
pause that doubles; after `up.max_restarts` deaths in close succession everything ends. A stop goes
in order: the routers let running requests finish, then the workers drain. What does not stop in
time is killed; a second signal kills everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.config import MOVE_S, UNPIN_S, refuse
from pdserve.local import specs
from pdserve.local.forkserver import ForkServer
from pdserve.local.gpus import gpus_for, is_cpu_build
from pdserve.local.process import ChildProcess
from pdserve.security.tls import dialer
from pdserve.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from pdserve.config import Config
    from pdserve.local.display import Display

PRELOAD = "workers.vllm.preload:preload"
OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
FORGIVEN_AFTER_S = 300.0  # a process that served this long has no deaths
QUICK_STOP_S = 5.0  # for a process that is not serving
_MARGIN_S = 5.0  # beyond the deadlines that processes have themselves
_POLL_S = 0.05
_SPINNER_S = 0.25
_LIST_TIMEOUT_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Restarts:
    """The restarts of one process. Counts its deaths in close succession."""

    def __init__(self, most: int) -> None:
        self.deaths = 0
        self._most = most

    def pause_s(self, served_s: float) -> float | None:
        """Return the pause before a process that died after serving for `served_s` is restarted,
        or None after too many deaths."""
        if served_s >= FORGIVEN_AFTER_S:
            self.deaths = 0
        self.deaths += 1
        if self.deaths > self._most:
            return None
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.deaths - 1)))


class Supervisor:
    """One `pdserve up`. Owns the processes, the files in the run directory and the ready file."""

    def __init__(self, config: Config, display: Display) -> None:
        """Raises ConfigError if this machine cannot run the configuration."""
        self._routers = specs.router_configs(config)
        for router in self._routers.values():
            specs.check_ports(router)
        specs.check_model(config.worker)
        self._config = config
        self._display = display
        self._model = config.worker.served_model_name
        self._workers = specs.worker_configs(config, os.sched_getaffinity(0), gpus_for(config))
        self._dialer = dialer(config.worker.access, "worker.access")  # as a worker
        self._ready_file = Path(config.up.ready_file) if config.up.ready_file else None
        self._run_dir = _make_run_dir(config.up.run_dir)
        # vLLM leaves files in the temporary folder when it is killed.
        self._temporary_dir = tempfile.TemporaryDirectory(prefix="pdserve-tmp-")
        self._addresses = {
            name: _address(router.grpc_host, router.grpc_port)
            for name, router in self._routers.items()
        }
        self._forkserver: ForkServer | None = None
        if config.worker.engine == "vllm" and is_cpu_build():
            # A worker that is restarted need not import vLLM again, which takes most of its start.
            self._forkserver = ForkServer(PRELOAD, log=self._run_dir / "forkserver.log")
        self._children: dict[str, ChildProcess] = {}
        self._facts: dict[str, dict[str, str]] = {}
        self._serving, self._stopping = asyncio.Event(), asyncio.Event()
        self._router_ready = {name: asyncio.Event() for name in self._routers}
        # Signals: the first one stops, the second one kills.
        self._stop, self._kill = asyncio.Event(), asyncio.Event()
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Start everything, serve until stopped, and return the exit code. No process is left."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self._forget_ready_file()
        names = (*self._routers, *self._workers)
        self._display.starting(names, self._run_dir)
        keepers = [asyncio.create_task(self._keep(name), name=f"keep-{name}") for name in names]
        try:
            code = await self._serve()
            return INTERRUPTED if self._kill.is_set() else code
        finally:
            self._display.close()
            self._forget_ready_file()
            # After an orderly stop no process is left; after an internal error all may be.
            self._stopping.set()
            for child in self._children.values():
                child.send(signal.SIGKILL)
            for child in self._children.values():
                await child.ended.wait()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            if self._forkserver is not None:
                self._forkserver.kill()
                self._forkserver.close()
            self._temporary_dir.cleanup()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def _serve(self) -> int:
        starting = asyncio.create_task(self._start())
        await self._first(starting, self._failed, self._stop.wait())
        is_started = starting.done() and starting.result()
        starting.cancel()
        await asyncio.wait((starting,))
        if self._failed.done():
            await self._stop_all()
            return self._failed.result()
        if not is_started:
            if self._stop.is_set():
                self._display.tell("stopping")
            await self._stop_all()
            return OK if self._stop.is_set() else FAILED
        self._serving.set()
        self._announce()
        self._display.serving([self._facts[name] for name in self._routers], self._model)
        await self._first(self._failed, self._stop.wait())
        if self._failed.done():
            await self._stop_all()
            return self._failed.result()
        self._display.tell("stopping: running requests may finish")
        self._stopping.set()
        config = self._config
        drain_s = config.worker.drain_timeout_s + MOVE_S + UNPIN_S
        await self._terminate(self._routers, config.router.stop_grace_s + _MARGIN_S)
        await self._terminate(self._workers, drain_s + _MARGIN_S)
        return OK

    async def _start(self) -> bool:
        """Return True once every router can place work on every worker, or False if that takes too
        long."""
        began, unregistered = time.monotonic(), set(self._workers)
        polls = [asyncio.create_task(self._registrations(name)) for name in self._routers]
        try:
            while True:
                awaited = [n for n in (*self._routers, *self._workers) if n not in self._facts]
                if all(poll.done() for poll in polls):
                    unregistered.clear()
                if not awaited and not unregistered:
                    return True
                if time.monotonic() - began >= self._config.up.start_timeout_s:
                    late = ", ".join(awaited or sorted(unregistered))
                    waited = f"{self._config.up.start_timeout_s:g} s"
                    self._display.tell(f"not ready after {waited}: {late}", is_error=True)
                    return False
                self._display.waiting(awaited or sorted(unregistered))
                await asyncio.wait(polls, timeout=_SPINNER_S if unregistered else _POLL_S)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    async def _registrations(self, router: str) -> None:
        """Return when this router can place work on every worker."""
        await self._router_ready[router].wait()
        known: set[str] = set()
        async with self._dialer.open_channel(self._addresses[router]) as channel:
            stub = worker_pb2_grpc.RegistryStub(channel)
            while not known >= set(self._workers):
                await asyncio.sleep(_POLL_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    listed = await stub.ListWorkers(
                        worker_pb2.ListWorkersRequest(),
                        timeout=_LIST_TIMEOUT_S,
                        metadata=self._dialer.metadata,
                    )
                    known |= {x.info.worker_id for x in listed.workers if x.state == "ready"}

    async def _keep(self, name: str) -> None:
        """Run one process, and restart it while the service is up."""
        if name in self._workers and self._config.router.grpc_port == 0:
            # Workers are told the routers' addresses, which are known when those listen.
            for router_ready in self._router_ready.values():
                await router_ready.wait()
        restarts = Restarts(self._config.up.max_restarts)
        while not self._stopping.is_set():
            forkserver = self._forkserver if name in self._workers else None
            spec = self._spec(name)
            child = ChildProcess(
                *(spec, self._run_dir, self._temporary_dir.name, self._display, forkserver)
            )
            self._children[name] = child
            running = asyncio.create_task(child.run())
            await self._first(running, child.ready.wait())
            if child.ready.is_set():
                self._facts[name] = child.facts
                if name in self._routers:
                    self._addresses[name] = child.facts["grpc"]
                    self._router_ready[name].set()
                if self._serving.is_set() and not self._stopping.is_set():
                    self._announce()
                    self._display.tell(f"{name} is back")
            code = await running
            if self._stopping.is_set():
                return None
            if child.ready.is_set() and code == OK and self._serving.is_set():
                self._display.tell(f"{name} has ended and is restarted")
                continue
            self._display.died(name, code, child.failure, child.tail(), child.log_path)
            if not self._serving.is_set():
                return self._fail(BAD_CONFIG if code == BAD_CONFIG else FAILED)
            served_s = time.monotonic() - child.ready_at if child.ready.is_set() else 0.0
            pause_s = restarts.pause_s(served_s)
            if pause_s is None:
                times = "once" if restarts.deaths == 1 else f"{restarts.deaths} times"
                self._display.tell(f"{name} died {times}; giving up", is_error=True)
                return self._fail(FAILED)
            self._display.tell(f"{name} is restarted in {pause_s:g} s")
            await asyncio.sleep(pause_s)
        return None

    def _fail(self, code: int) -> None:
        if not self._failed.done():
            self._failed.set_result(code)

    def _spec(self, name: str) -> specs.ProcessSpec:
        if name in self._workers:
            return specs.worker_spec(self._workers[name], [*self._addresses.values()])
        return specs.router_spec(name, self._routers[name], self._facts.get(name))

    async def _stop_all(self) -> None:
        self._stopping.set()
        await self._terminate((*self._routers, *self._workers), QUICK_STOP_S)

    async def _terminate(self, names: Collection[str], grace_s: float) -> None:
        """End processes: SIGTERM, and SIGKILL after `grace_s` or a second signal."""
        children = [self._children[name] for name in names if name in self._children]
        alive = [child for child in children if not child.ended.is_set()]
        for child in alive:
            child.send(signal.SIGTERM)
        for child in alive:
            limit_s = grace_s if child.ready.is_set() else min(grace_s, QUICK_STOP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if self._kill.is_set() else limit_s):
                    await self._first(child.ended.wait(), self._kill.wait())
            if self._kill.is_set():
                self._display.tell("stopping at once")
                break
            if not child.ended.is_set():
                self._display.tell(f"{child.spec.name} did not stop in time and is killed")
                child.send(signal.SIGKILL)
        if self._kill.is_set():
            for child in self._children.values():
                child.send(signal.SIGKILL)
        for child in alive:
            await child.ended.wait()

    async def _first(self, *things: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        """Wait until one of `things` is done. Coroutines are cancelled afterwards."""
        tasks = [x if isinstance(x, asyncio.Future) else asyncio.ensure_future(x) for x in things]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task, thing in zip(tasks, things, strict=True):
                if task is not thing:
                    task.cancel()

    def _announce(self) -> None:
        """Write the ready file, atomically. Roles are those at start."""
        if self._ready_file is None:
            return
        routers = [
            {
                "http": self._facts[name]["http"],
                "grpc": self._facts[name]["grpc"],
                "pid": self._children[name].pid,
                "log": str(self._children[name].log_path),
            }
            for name in self._routers
        ]
        workers = [
            {
                "worker_id": name,
                "role": config.role.value,
                "pid": self._children[name].pid,
                "address": self._facts[name]["address"],
                "debug": self._facts[name]["debug"],
                "log": str(self._children[name].log_path),
            }
            for name, config in self._workers.items()
        ]
        first = routers[0]
        content = {
            "pid": os.getpid(),
            "http": first["http"],
            "grpc": first["grpc"],
            "model": self._model,
            "run_dir": str(self._run_dir),
            "router": {"pid": first["pid"], "log": first["log"]},
            "routers": routers,
            "workers": workers,
        }
        partial = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._ready_file)

    def _forget_ready_file(self) -> None:
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)


def _address(host: str, port: int) -> str:
    return specs.reachable(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _make_run_dir(configured: str) -> Path:
    if not configured:
        return Path(tempfile.mkdtemp(prefix="pdserve-"))
    path = Path(configured)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("up.run_dir", f"cannot create {configured}: {error}")
    return path
