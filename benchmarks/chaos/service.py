"""A real service under test: inspected, broken, and accounted for."""

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
from benchmarks.service import RPC_TIMEOUT_S, Service
from pdserve import rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

LOOK_S: Final = 0.02
WHOLE_S: Final = 240.0
T = TypeVar("T")


class ServiceUnderTest(Service):
    """A `pdserve up` whose workers take orders. `names` are its workers'."""

    def __init__(self, config: Mapping[str, Any], directory: Path) -> None:
        super().__init__("the service", config, directory, environment=hooks.environment(directory))
        roles = ("prefill", "decode", "aggregated")
        counts = {role: config["up"][role]["workers"] for role in roles}
        self.names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
        self._gone: set[int] = set()  # pids that were ended

    async def listed_by_all(self) -> list[w.ListWorkersResponse]:
        """Return what each router says of its workers; nothing for one that does not answer."""
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
        """Return the workers by name, as the first router that answers has them."""
        for listed in await self.listed_by_all():
            if listed.workers:
                return {x.info.worker_id: x for x in listed.workers}
        return {}

    def router_pids(self) -> list[int]:
        """Return the process of each router, by the ready file; 0 for one that was ended."""
        pids = [int(router["pid"]) for router in self.read_ready()["routers"]]
        return [0 if pid in self._gone or not psutil.pid_exists(pid) else pid for pid in pids]

    async def ready_workers(self, role: str) -> list[w.WorkerEntry]:
        """Return the workers of a role that are given work now."""
        return [
            entry
            for name, entry in (await self.entries()).items()
            if name.startswith(role) and entry.state == "ready" and entry.info.pid not in self._gone
        ]

    def end(self, pid: int, sign: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process, or tell it to end."""
        self._gone.add(pid)
        os.kill(pid, sign)

    async def until_whole(self) -> None:
        """Wait until all workers are ready and no pair is ejected. Raises BenchError."""
        if why := await _until_none(self._missing, WHOLE_S):
            raise BenchError(f"not whole after {WHOLE_S:g} s: {', '.join(why)}")

    async def _missing(self) -> list[str]:
        found = [] if all(self.router_pids()) else ["a router is not back"]
        for listed in await self.listed_by_all():
            ready = [x.info for x in listed.workers if x.state == "ready"]
            back = {info.worker_id for info in ready if info.pid not in self._gone}
            found += [f"{name} is not ready" for name in self.names if name not in back]
            ejected = [x for x in listed.ejected_pairs if x.remaining_s]
            found += [f"{x.prefill_worker} and {x.decode_worker} are ejected" for x in ejected]
        return found

    async def until_empty(self, within_s: float) -> list[tuple[int, str]]:
        """Wait until nothing is held anywhere. Return what still is: KV blocks, and in words."""
        return await _until_none(self._held, within_s)

    async def _held(self) -> list[tuple[int, str]]:
        held = [
            (0, f"router {number}: {entry.outstanding_requests} requests of {entry.info.worker_id}")
            for number, listed in enumerate(await self.listed_by_all())
            for entry in listed.workers
            if entry.outstanding_requests or entry.outstanding_tokens
        ]
        for name, entry in (await self.entries()).items():
            try:
                async with rpc.open_channel(entry.info.address) as channel:
                    request = w.GetStatusRequest()
                    status = await WorkerStub(channel).GetStatus(request, timeout=RPC_TIMEOUT_S)
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
    """Look until nothing is found, and return what was found last."""
    until_s = time.monotonic() + within_s
    while (found := await look()) and time.monotonic() < until_s:  # noqa: ASYNC110 - it has to be asked
        await asyncio.sleep(0.05)
    return found
