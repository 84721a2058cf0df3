"""Carry out what `supervision` decides: start processes, forward signals, watch registrations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.config import refuse
from pdserve.local import specs
from pdserve.local import supervision as sv
from pdserve.local.display import ready_content, write_ready_file
from pdserve.local.forkserver import ForkServer
from pdserve.local.gpus import gpus_for, is_cpu_build
from pdserve.local.process import ChildProcess, Doing, Exited, ProcessEvent, Ready
from pdserve.security.tls import dialer
from pdserve.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from pdserve.config import Config
    from pdserve.local.display import Display

_POLL_S = 0.05
_SPINNER_S = 0.25
_LIST_TIMEOUT_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """One `pdserve up`. Owns the processes, the files in the run directory and the ready file."""

    def __init__(self, config: Config, display: Display) -> None:
        """Raises ConfigError if this machine cannot run the configuration."""
        self._routers = specs.router_configs(config)
        for router in self._routers.values():
            specs.check_ports(router)
        self._display = display
        self._model = config.worker.served_model_name
        specs.check_model(config.worker)
        self._workers = specs.worker_configs(config, os.sched_getaffinity(0), gpus_for(config))
        self._dialer = dialer(config.worker.access, "worker.access")  # as a worker
        self._ready_file = Path(config.up.ready_file) if config.up.ready_file else None
        self._run_dir = _make_run_dir(config.up.run_dir)
        self._addresses = {
            name: _address(router.grpc_host, router.grpc_port)
            for name, router in self._routers.items()
        }
        self._forkserver: ForkServer | None = None
        if config.worker.engine == "vllm" and is_cpu_build():
            # A worker that is restarted need not import vLLM again, which takes most of its start.
            self._forkserver = ForkServer(
                "workers.vllm.preload:preload", log=self._run_dir / "forkserver.log"
            )
        self._children: dict[str, ChildProcess] = {}
        self._facts: dict[str, dict[str, str]] = {}
        self._events: asyncio.Queue[ProcessEvent | signal.Signals | set[str]] = asyncio.Queue()
        self._supervision = sv.Supervision(
            routers=tuple(self._routers),
            workers=tuple(self._workers),
            policy=specs.policy_of(config),
            router_addresses_known=config.router.grpc_port != 0,
        )
        self._known: dict[str, set[str]] = {name: set() for name in self._routers}
        self._registrations: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Start everything, serve until stopped, and return the exit code. No process is left."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._events.put_nowait, number)
        self._forget_ready_file()
        self._display.starting((*self._routers, *self._workers), self._run_dir)
        try:
            return await self._loop()
        finally:
            await self._close()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _loop(self) -> int:
        orders = self._supervision.begin(time.monotonic())
        while True:
            for order in orders:
                if isinstance(order, sv.Finish):
                    return order.exit_code
                self._carry_out(order)
            orders = await self._next_orders()

    async def _next_orders(self) -> list[sv.Order]:
        """Wait for an event or a deadline, and return what to do."""
        wake_at = self._supervision.wake_at()
        wait_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        if self._supervision.is_starting:
            self._display.waiting(self._supervision.awaited)
            wait_s = _SPINNER_S if wait_s is None else min(wait_s, _SPINNER_S)
        try:
            event = await asyncio.wait_for(self._events.get(), wait_s)
        except TimeoutError:
            return self._supervision.tick(time.monotonic())
        return self._decide(event, time.monotonic())

    def _decide(
        self, event: ProcessEvent | signal.Signals | set[str], now: float
    ) -> list[sv.Order]:
        if isinstance(event, Doing):
            self._display.doing(event.name, event.what)
            return []
        if isinstance(event, Ready):
            self._facts[event.name] = event.facts
            if event.name in self._routers:
                self._addresses[event.name] = event.facts["grpc"]
                self._watch_registration(event.name)
            return self._supervision.became_ready(event.name, now)
        if isinstance(event, Exited):
            return self._supervision.exited(event.name, event.code, now)
        if isinstance(event, signal.Signals):
            return self._supervision.stop_requested(now)
        return self._supervision.registered(event)

    def _carry_out(self, order: sv.Order) -> None:
        match order:
            case sv.Start(name):
                spec = self._spec(name)
                forkserver = self._forkserver if spec.command == "worker" else None
                put = self._events.put_nowait
                self._children[name] = ChildProcess(spec, self._run_dir, put, forkserver)
                self._children[name].start()
            case sv.Send(name, number):
                self._children[name].send(number)
            case sv.Announce(first):
                self._announce(first=first)
            case sv.Tell(text, is_error):
                self._display.tell(text, is_error=is_error)
            case sv.Explain(name, code):
                child = self._children[name]
                self._display.died(name, code, child.failure, child.tail(), child.log_path)
            case _:
                raise AssertionError(f"unknown order: {order!r}")

    def _spec(self, name: str) -> specs.ProcessSpec:
        if name in self._workers:
            return specs.worker_spec(self._workers[name], [*self._addresses.values()])
        return specs.router_spec(name, self._routers[name], self._facts.get(name))

    def _announce(self, *, first: bool) -> None:
        routers, workers = (
            [self._children[name] for name in names] for names in (self._routers, self._workers)
        )
        if self._ready_file is not None:
            content = ready_content(routers, workers, self._facts, self._model, self._run_dir)
            write_ready_file(self._ready_file, content)
        if first:
            self._display.serving([self._facts[name] for name in self._routers], self._model)

    def _watch_registration(self, router: str) -> None:
        if router not in self._registrations:
            self._registrations[router] = asyncio.create_task(self._poll_registration(router))

    async def _poll_registration(self, router: str) -> None:
        """Report the workers that every router can use, until this router can use all of them."""
        known = self._known[router]
        async with self._dialer.open_channel(self._addresses[router]) as channel:
            stub = worker_pb2_grpc.RegistryStub(channel)
            while known < set(self._workers):
                try:
                    request = worker_pb2.ListWorkersRequest()
                    listed = await stub.ListWorkers(
                        request, timeout=_LIST_TIMEOUT_S, metadata=self._dialer.metadata
                    )
                except grpc.aio.AioRpcError:
                    listed = worker_pb2.ListWorkersResponse()
                now_ready = {x.info.worker_id for x in listed.workers if x.state == "ready"}
                if now_ready - known:
                    known |= now_ready
                    self._events.put_nowait(set.intersection(*self._known.values()))
                await asyncio.sleep(_POLL_S)

    async def _close(self) -> None:
        self._display.close()
        self._forget_ready_file()
        for registration in self._registrations.values():
            registration.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await registration
        # After an orderly stop no process is left; after an internal error all may be.
        for child in self._children.values():
            child.send(signal.SIGKILL)
        for child in self._children.values():
            await child.reaped()
        if self._forkserver is not None:
            self._forkserver.kill()
            self._forkserver.close()

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
