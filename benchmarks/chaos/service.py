"""A real service under test: started, inspected, broken, and accounted for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
import psutil

from benchmarks.chaos import hooks
from benchmarks.errors import BenchError
from benchmarks.service import Service, with_children
from pdserve import rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

LOOK_S: Final = 0.02
WHOLE_S: Final = 240.0
_RPC_S: Final = 5.0
_SHM: Final = "/dev/shm/"


@dataclass(slots=True)
class Leftovers:
    """What is still held and should not be."""

    blocks: int = 0
    what: list[str] = field(default_factory=list)


class ServiceUnderTest(Service):
    """A `pdserve up` whose workers take orders. `names` are its workers'."""

    def __init__(self, config: Mapping[str, Any], directory: Path) -> None:
        super().__init__("the service", config, directory, environment=hooks.environment(directory))
        up = config["up"]
        roles = ("prefill", "decode", "aggregated")
        self.names = [f"{role}-{i}" for role in roles for i in range(up.get(role, 0))]
        self.model, self.vocab_size = "", 0
        self.grpc: list[str] = []
        self.http: list[str] = []
        self._gone: set[int] = set()  # pids that were ended
        self._seen: dict[int, float] = {}  # creation time of every process seen
        self._shm: set[str] = set()
        self._ending = AsyncExitStack()

    async def start(self) -> None:
        await super().start()
        self.model = self.ready["model"]
        self.grpc = [router["grpc"] for router in self.ready["routers"]]
        self.http = [router["http"] for router in self.ready["routers"]]
        channels = [await self._ending.enter_async_context(rpc.open_channel(x)) for x in self.grpc]
        self._registries = [RegistryStub(channel) for channel in channels]
        self.vocab_size = (await self.listed())[0].info.model.vocab_size
        self.look()

    async def stop(self) -> None:
        if self.ready:
            with suppress(BenchError):
                self.look()
        await self._ending.aclose()
        await super().stop()

    def left(self) -> list[str]:
        """After `stop`: processes and shared memory that still exist."""
        processes = []
        for pid, created in self._seen.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if process.create_time() == created and is_alive:
                    processes.append(f"process {pid}")
        return processes + sorted(self._shm & {str(path) for path in Path(_SHM).iterdir()})

    def look(self) -> None:
        """Note every process and its files in /dev/shm."""
        for process in with_children([self.pid]):
            with suppress(psutil.NoSuchProcess, OSError):
                self._seen[process.pid] = process.create_time()
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
                lines = (x for x in maps.splitlines() if _SHM in x and "(deleted)" not in x)
                self._shm |= {f"{_SHM}{x.rpartition(_SHM)[2]}" for x in lines}

    # -- what it says of itself

    async def listed(self) -> list[w.WorkerEntry]:
        """Return the workers of the first router that answers."""
        for registry in self._registries:
            listed = await self._list(registry)
            if listed.workers:
                return list(listed.workers)
        return []

    async def _list(self, registry: RegistryAsyncStub) -> w.ListWorkersResponse:
        try:
            request = w.ListWorkersRequest()
            return await registry.ListWorkers(request, timeout=_RPC_S, wait_for_ready=False)
        except grpc.aio.AioRpcError:
            _ = self.pid  # raises BenchError if all has ended
            return w.ListWorkersResponse()

    async def entry(self, name: str) -> w.WorkerEntry | None:
        return next((x for x in await self.listed() if x.info.worker_id == name), None)

    async def worker_pid(self, name: str) -> int:
        """Raises BenchError if the worker is not there."""
        entry = await self.entry(name)
        if entry is None or entry.info.pid in self._gone:
            raise BenchError(f"{name} is not there")
        return entry.info.pid

    def router_pids(self) -> list[int]:
        """Return the process of each router, by the ready file; 0 for one that was ended."""
        pids = [int(router["pid"]) for router in self.read_ready()["routers"]]
        return [0 if pid in self._gone or not psutil.pid_exists(pid) else pid for pid in pids]

    async def busiest_router(self) -> int:
        """Return the number of the router with the most requests."""
        counts = [
            sum(x.outstanding_requests for x in (await self._list(registry)).workers)
            for registry in self._registries
        ]
        return counts.index(max(counts))

    async def ready_workers(self, role: str) -> list[str]:
        """Return the workers of a role that are given work now."""
        return [
            x.info.worker_id
            for x in await self.listed()
            if x.state == "ready"
            and x.info.worker_id.startswith(f"{role}-")
            and x.info.pid not in self._gone
        ]

    async def until_whole(self) -> None:
        """Wait until all workers are ready and no pair is ejected. Raises BenchError."""
        until_s = time.monotonic() + WHOLE_S
        while why := await self._not_whole():
            if time.monotonic() > until_s:
                raise BenchError(f"not whole after {WHOLE_S:g} s: {why}")
            await asyncio.sleep(LOOK_S)
        self.look()

    async def _not_whole(self) -> str:
        for registry in self._registries:
            listed = await self._list(registry)
            entries = {x.info.worker_id: x for x in listed.workers}
            for name in self.names:
                entry = entries.get(name)
                if entry is None or entry.info.pid in self._gone:
                    return f"{name} is not back"
                if entry.state != "ready":
                    return f"{name} is {entry.state}"
            for pair in listed.ejected_pairs:
                if pair.remaining_s:
                    return f"{pair.prefill_worker} and {pair.decode_worker} are ejected"
        return "" if all(self.router_pids()) else "a router is not back"

    async def until_serving(self) -> None:
        """Wait for a ready worker of each role."""
        for role in ("prefill", "decode"):
            while not await self.ready_workers(role):  # noqa: ASYNC110 - the router has to be asked
                await asyncio.sleep(LOOK_S)

    async def until_empty(self, within_s: float) -> Leftovers:
        """Wait until nothing is held anywhere; return what still is."""
        until_s = time.monotonic() + within_s
        while True:
            left = await self._held()
            if not (left.blocks or left.what) or time.monotonic() > until_s:
                return left
            await asyncio.sleep(0.1)

    async def _held(self) -> Leftovers:
        left = Leftovers()
        for number, registry in enumerate(self._registries):
            for entry in (await self._list(registry)).workers:
                if entry.outstanding_requests or entry.outstanding_tokens:
                    count = entry.outstanding_requests
                    left.what.append(
                        f"{count} requests of {entry.info.worker_id} at router {number}"
                    )
        for entry in await self.listed():
            name = entry.info.worker_id
            try:
                async with rpc.open_channel(entry.info.address) as channel:
                    status = await WorkerStub(channel).GetStatus(
                        w.GetStatusRequest(), timeout=_RPC_S
                    )
            except grpc.aio.AioRpcError as error:
                left.what.append(f"{name} does not answer: {error.code().name}")
                continue
            ledger = status.ledger
            left.blocks += ledger.pinned_blocks
            if ledger.pinned_blocks or ledger.transfers or ledger.engine_requests:
                left.what.append(
                    f"{name}: {ledger.pinned_blocks} blocks, {ledger.transfers} transfers, "
                    f"{ledger.engine_requests} requests"
                )
        return left

    # -- breaking it

    def end(self, pid: int, sign: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process, or tell it to end."""
        self._gone.add(pid)
        os.kill(pid, sign)
