"""A real service under test: started, looked into, hurt, and accounted for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import grpc.aio
import psutil

from benchmarks.chaos import figures, orders
from benchmarks.chaos.memory import kv_caches
from benchmarks.compare.stack import Stack
from benchmarks.errors import BenchError
from pdserve import rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.chaos.figures import Figures
    from benchmarks.chaos.orders import Order
    from pdserve.v1.worker_pb2_grpc import RegistryAsyncStub

LOOK_S: Final = 0.02
WHOLE_S: Final = 240.0
_RPC_S: Final = 5.0
_SHM: Final = "/dev/shm/"


@dataclass(slots=True)
class Leftovers:
    """What is still there and should not be."""

    blocks: int = 0
    what: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.blocks and not self.what


class Service:
    """Owns a `pdserve up` whose processes take orders. ``names`` are its workers',
    ``router_names`` its routers'; ``routers`` and ``urls`` are where these serve gRPC and HTTP, and
    ``grpc`` and ``http`` the first of them."""

    def __init__(self, config: Mapping[str, Any], directory: Path) -> None:
        up = config["up"]
        roles = ("prefill", "decode", "aggregated")
        self.names = tuple(f"{role}-{i}" for role in roles for i in range(up.get(role, 0)))
        count = up.get("routers", 1)
        one = ("router",)
        self.router_names = one if count == 1 else tuple(f"router-{i}" for i in range(count))
        self._directory = directory
        self._stack = Stack("chaos", config, directory, module="benchmarks.chaos.hooks.up")
        self._gone: set[int] = set()  # pids that were killed
        self._seen: dict[int, float] = {}  # every process seen, with its time of creation
        self._shm: set[str] = set()
        self._calm: dict[str, Figures] = {}
        self.grpc = self.http = self.model = ""
        self.routers: tuple[str, ...] = ()
        self.urls: tuple[str, ...] = ()
        self.vocab_size = 0

    async def start(self) -> None:
        """Raises :class:`BenchError`."""
        await self._stack.start()
        assert self._stack.ready is not None
        ready = self._stack.ready
        self.grpc, self.http, self.model = ready["grpc"], ready["http"], ready["model"]
        self.routers = tuple(router["grpc"] for router in ready["routers"])
        self.urls = tuple(router["http"] for router in ready["routers"])
        self._channels = [rpc.open_channel(address) for address in self.routers]
        self._registries = [RegistryStub(channel) for channel in self._channels]
        # Each look is a connection of its own: those of a router that is gone are of no use.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        listed = await self.listed()
        self.vocab_size = listed[0].info.model.vocab_size
        self._calm = {
            name: found for name, found in (await self.figures()).items() if found is not None
        }
        self.look()

    async def stop(self) -> Leftovers:
        """End it; what its processes have left behind."""
        self.look()
        if self.grpc:
            await self._session.close()
            for channel in self._channels:
                await channel.close()
        await self._stack.stop()
        what = [f"process {pid}" for pid in self._alive()]
        return Leftovers(0, what + self._files_left())

    # -- looking

    async def listed(self) -> list[w.WorkerEntry]:
        """What the first router that answers says of its workers; nothing where none does."""
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
            _ = self._stack.pid
            return w.ListWorkersResponse()

    async def entry(self, name: str) -> w.WorkerEntry | None:
        """What it says of one."""
        return next((x for x in await self.listed() if x.info.worker_id == name), None)

    async def pid(self, name: str) -> int:
        """Of the present life of a worker or router; raises :class:`BenchError` where it has
        none."""
        if name in self.router_names:
            return self._router_pid(name)
        entry = await self.entry(name)
        if entry is None or entry.info.pid in self._gone:
            raise BenchError(f"{name} is not there")
        return entry.info.pid

    async def pids(self) -> dict[int, str]:
        """Names by pid: `pdserve up`, and the present lives of its routers and workers."""
        found = {self._stack.pid: "up"}
        for name in self.router_names:
            with suppress(BenchError):
                found[self._router_pid(name)] = name
        for entry in await self.listed():
            if entry.info.pid not in self._gone:
                found[entry.info.pid] = entry.info.worker_id
        return found

    def was_killed(self, pid: int) -> bool:
        """By us, or told to end."""
        return pid in self._gone

    def _router_pid(self, name: str) -> int:
        for child in psutil.Process(self._stack.pid).children():
            try:
                command, path = child.cmdline()[3:6:2]
            except (psutil.NoSuchProcess, ValueError):
                continue
            is_it = command == "router" and Path(path).stem == name
            if is_it and child.pid not in self._gone:
                return child.pid
        raise BenchError(f"{name} is not there")

    async def until_whole(self, within_s: float = WHOLE_S) -> None:
        """Every worker is ready, as a process that was not killed, and no pair is kept apart."""
        ends_at = time.monotonic() + within_s
        while why := await self._not_whole():
            if time.monotonic() > ends_at:
                raise BenchError(f"not whole after {within_s:g} s: {why}")
            await asyncio.sleep(LOOK_S)
        self.look()

    async def _not_whole(self) -> str:
        for registry in self._registries:
            why = self._lacks(await self._list(registry))
            if why:
                return why
        try:
            _ = [self._router_pid(name) for name in self.router_names]
        except BenchError as error:
            return str(error)
        return ""

    def _lacks(self, listed: w.ListWorkersResponse) -> str:
        entries = {x.info.worker_id: x for x in listed.workers}
        for name in self.names:
            entry = entries.get(name)
            if entry is None or entry.info.pid in self._gone:
                return f"{name} is not back"
            if entry.state != "ready":
                return f"{name} is {entry.state}"
        for pair in listed.quarantined:
            if pair.remaining_s:
                return f"{pair.prefill_worker} and {pair.decode_worker} are kept apart"
        return ""

    async def outstanding(self, router: str) -> int:
        """Requests that a router has at its workers."""
        registry = self._registries[self.router_names.index(router)]
        return sum(x.outstanding_requests for x in (await self._list(registry)).workers)

    async def busiest_router(self) -> str:
        """The one that has the most."""
        counts = {name: await self.outstanding(name) for name in self.router_names}
        return max(counts, key=lambda name: counts[name])

    async def figures(self) -> dict[str, Figures | None]:
        """What each router and worker has open; None of one that does not answer."""
        places = dict(zip(self.router_names, self.urls, strict=True))
        places |= {x.info.worker_id: f"http://{x.info.debug_address}" for x in await self.listed()}
        found: dict[str, Figures | None] = {}
        for name, url in places.items():
            try:
                pid = await self.pid(name)
            except BenchError:
                found[name] = None
            else:
                found[name] = await figures.take(self._session, f"{url}/metrics", pid)
        return found

    async def ready(self, role: str) -> list[str]:
        """The workers of a role that are given work now."""
        return [
            x.info.worker_id
            for x in await self.listed()
            if x.state == "ready"
            and x.info.worker_id.startswith(f"{role}-")
            and x.info.pid not in self._gone
        ]

    async def until_empty(self, within_s: float) -> Leftovers:
        """Nothing is pinned, held or open anywhere, or what still is after so long."""
        ends_at = time.monotonic() + within_s
        while True:
            left = await self._held()
            if left.is_empty or time.monotonic() > ends_at:
                return left
            await asyncio.sleep(0.1)

    async def _held(self) -> Leftovers:
        left = Leftovers()
        for router, registry in zip(self.router_names, self._registries, strict=True):
            for entry in (await self._list(registry)).workers:
                if entry.outstanding_requests or entry.outstanding_tokens:
                    what = f"{entry.outstanding_requests} requests of {entry.info.worker_id}"
                    left.what.append(f"{what} at {router}")
        await self._held_by_workers(left)
        await self._mapped(left)
        for name, found in (await self.figures()).items():
            if found is None:
                left.what.append(f"{name} tells no figures")
            elif more := figures.grown(self._calm[name], found):
                left.what.append(f"{name}: {more}")
        return left

    async def _mapped(self, left: Leftovers) -> None:
        """A worker has one KV cache in shared memory, which its peers map too: more than there are
        workers are of such as are gone."""
        pids = await self.pids()
        more = len(kv_caches(pids)) - len(self.names)
        if more > 0:
            left.what.append(f"{more} KV caches of workers that are gone are mapped")

    async def _held_by_workers(self, left: Leftovers) -> None:
        for entry in await self.listed():
            name = entry.info.worker_id
            try:
                async with grpc.aio.insecure_channel(entry.info.address) as channel:
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
            if status.kv.quarantined_slots:
                left.what.append(f"{name}: {status.kv.quarantined_slots} slots in quarantine")

    def look(self) -> None:
        """Take note of every process there is, and of its files in /dev/shm."""
        top = psutil.Process(self._stack.pid)
        for process in (top, *top.children(recursive=True)):
            try:
                self._seen[process.pid] = process.create_time()
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            except (psutil.NoSuchProcess, OSError):
                continue
            lines = (line for line in maps.splitlines() if _SHM in line)
            self._shm |= {f"{_SHM}{line.rpartition(_SHM)[2]}" for line in lines}
        self._shm = {path for path in self._shm if not path.endswith(" (deleted)")}

    def _alive(self) -> list[int]:
        found = []
        for pid, created in self._seen.items():
            try:
                process = psutil.Process(pid)
                is_ours = process.create_time() == created
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def _files_left(self) -> list[str]:
        return sorted(self._shm & {str(path) for path in Path(_SHM).iterdir()})

    def rss_bytes(self) -> dict[int, int]:
        """Resident memory of every process, by pid."""
        found = {}
        top = psutil.Process(self._stack.pid)
        for process in (top, *top.children(recursive=True)):
            try:
                found[process.pid] = process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return found

    # -- hurting

    def kill_pid(self, pid: int) -> None:
        """SIGKILL, to a process of this service."""
        self._gone.add(pid)
        os.kill(pid, signal.SIGKILL)

    def end_pid(self, pid: int) -> None:
        """SIGTERM: it may end what it does, and another takes its place."""
        self._gone.add(pid)
        os.kill(pid, signal.SIGTERM)

    def stop_pid(self, pid: int) -> None:
        """SIGSTOP."""
        os.kill(pid, signal.SIGSTOP)

    def go_on_pid(self, pid: int) -> None:
        """SIGCONT, if it is still there."""
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    def order(self, name: str, order: Order) -> None:
        """Tell a process what to do wrong."""
        orders.give(self._directory, name, order)

    def hits(self, *names: str) -> int:
        """How often they have done so."""
        return sum(orders.hits(self._directory, name) for name in names)

    @property
    def up_pid(self) -> int:
        """Of `pdserve up` itself."""
        return self._stack.pid

    async def until_state(self, name: str, state: str) -> None:
        """The router says that of a worker."""
        while True:
            entry = await self.entry(name)
            if entry is not None and entry.state == state:
                return
            await asyncio.sleep(LOOK_S)

    async def until_both_roles(self) -> None:
        """There is a prefill and a decode worker that are given work."""
        for role in ("prefill", "decode"):
            while not await self.ready(role):  # noqa: ASYNC110 - the router has to be asked
                await asyncio.sleep(LOOK_S)
