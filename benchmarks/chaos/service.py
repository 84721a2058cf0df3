"""A real service under test: inspection, faults, and detection of leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc.aio
import psutil

from benchmarks.chaos import hooks
from benchmarks.errors import BenchError
from benchmarks.service import RPC_TIMEOUT_S, LocalService
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

LOOK_S: Final = 0.02
WHOLE_S: Final = 240.0
T = TypeVar("T")


class ServiceUnderTest(LocalService):
    """A `pdserve up` whose processes inject faults (`hooks`). `pids`: of its workers when it
    started, by name."""

    def __init__(
        self, config: Mapping[str, Any], directory: Path, *, copies_always: bool = False
    ) -> None:
        environment = hooks.environment(directory, copies_always=copies_always)
        super().__init__("the service", config, directory, environment=environment)
        self.pids: dict[str, int] = {}
        self._gone: set[int] = set()  # pids that `end` has signalled

    async def start(self) -> None:
        await super().start()
        self.pids = {name: entry.info.pid for name, entry in (await self.entries()).items()}

    async def take_deaths(self) -> list[str]:
        """Return the workers whose process is another one than at the last call, or at the start,
        without those that `end` has ended."""
        before = self.pids
        self.pids = {name: entry.info.pid for name, entry in (await self.entries()).items()}
        return [
            name
            for name, pid in before.items()
            if pid not in self._gone and self.pids.get(name) != pid
        ]

    async def listed_by_all(self) -> list[w.ListWorkersResponse]:
        """Return the workers listed by each router. Skip routers that do not answer."""
        found = []
        for router in range(len(self.ready["routers"])):
            try:
                found.append(await self.listed(router))
            except BenchError:
                if not self.is_alive:
                    raise
                found.append(w.ListWorkersResponse())
        return found

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """Return the workers by name, from the first router that lists any."""
        for listed in await self.listed_by_all():
            if listed.workers:
                return {x.info.worker_id: x for x in listed.workers}
        return {}

    def router_pids(self) -> list[int]:
        """Return the pid of each router from the ready file, or 0 for one that has ended."""
        pids = [int(router["pid"]) for router in self.read_ready()["routers"]]
        return [0 if pid in self._gone or not psutil.pid_exists(pid) else pid for pid in pids]

    async def ready_workers(self, role: str) -> list[w.WorkerEntry]:
        """Return the workers of a role that currently get work."""
        return [
            entry
            for name, entry in (await self.entries()).items()
            if name.startswith(role) and entry.state == "ready" and entry.info.pid not in self._gone
        ]

    def end(self, pid: int, sign: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal that ends a process."""
        self._gone.add(pid)
        os.kill(pid, sign)

    async def drain(self, name: str) -> None:
        """Drain a worker whose answers move at once, then end the drain."""
        operator = self.operator
        async with operator.open_channel(self.ready["routers"][0]["grpc"]) as channel:
            admin, metadata = AdminStub(channel), operator.metadata
            drain = a.DrainWorkerRequest(worker_id=name)
            async for _ in admin.DrainWorker(drain, timeout=WHOLE_S, metadata=metadata):
                pass
            undrain = a.UndrainWorkerRequest(worker_id=name)
            await admin.UndrainWorker(undrain, timeout=RPC_TIMEOUT_S, metadata=metadata)

    async def capsule(self, request_id: str) -> bytes | None:
        """Return the incident capsule of a request, from the first router that has one."""
        operator, asked = self.operator, a.GetCapsuleRequest(request_id=request_id)
        for router in self.ready["routers"]:
            try:
                async with operator.open_channel(router["grpc"]) as channel:
                    found = await AdminStub(channel).GetCapsule(
                        asked, timeout=RPC_TIMEOUT_S, metadata=operator.metadata
                    )
                return found.content
            except grpc.aio.AioRpcError:
                continue
        return None

    async def until_whole(self) -> None:
        """Wait until all workers are ready and no pair is ejected. Raises BenchError."""
        if why := await _until_none(self._missing, WHOLE_S):
            raise BenchError(f"not whole after {WHOLE_S:g} s: {', '.join(why)}")

    async def _missing(self) -> list[str]:
        found = [] if all(self.router_pids()) else ["a router is not back"]
        for listed in await self.listed_by_all():
            ready = [x.info for x in listed.workers if x.state == "ready"]
            back = {info.worker_id for info in ready if info.pid not in self._gone}
            found += [f"{name} is not ready" for name in self.pids if name not in back]
            ejected = [x for x in listed.ejected_pairs if x.remaining_s]
            found += [f"{x.prefill_worker} and {x.decode_worker} are ejected" for x in ejected]
        return found

    async def until_empty(self, within_s: float) -> list[tuple[int, str]]:
        """Wait until no worker holds anything. Return what is still held, as (KV blocks,
        description)."""
        return await _until_none(self._held, within_s)

    async def _held(self) -> list[tuple[int, str]]:
        held = [
            (0, f"router {number}: {entry.outstanding_requests} requests of {entry.info.worker_id}")
            for number, listed in enumerate(await self.listed_by_all())
            for entry in listed.workers
            if entry.outstanding_requests or entry.outstanding_tokens
        ]
        operator = self.operator
        for name, entry in (await self.entries()).items():
            try:
                async with operator.open_channel(entry.info.address) as channel:
                    status = await WorkerStub(channel).GetStatus(
                        w.GetStatusRequest(), timeout=RPC_TIMEOUT_S, metadata=operator.metadata
                    )
            except grpc.aio.AioRpcError as error:
                held.append((0, f"{name} does not answer: {error.code().name}"))
                continue
            ledger = status.ledger
            if ledger.pinned_blocks or ledger.transfers or ledger.engine_requests:
                rest = f"{ledger.transfers} transfers, {ledger.engine_requests} requests"
                held.append(
                    (ledger.pinned_blocks, f"{name}: {ledger.pinned_blocks} blocks, {rest}")
                )
        return held


async def _until_none(look: Callable[[], Awaitable[list[T]]], within_s: float) -> list[T]:
    """Call `look` until it returns nothing or `within_s` has passed. Return its last result."""
    until_s = time.monotonic() + within_s
    while (found := await look()) and time.monotonic() < until_s:  # noqa: ASYNC110 - only polling
        await asyncio.sleep(0.05)
    return found
