"""What a test does with a running service, whatever started it: calls of its router and workers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp

from pdserve.cli import main
from pdserve.net import rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Set


class Service(ABC):
    """A router at `url` (http://host:port) and `grpc` (host:port), and its workers. `operator` has
    the credentials of an operator; `start_s` limits the wait for a worker's start."""

    url: str
    grpc: str
    operator = rpc.Dialer()
    start_s = WAIT_S

    @property
    @abstractmethod
    def names(self) -> Set[str]:
        """The ids of the workers that were started and not ended."""

    async def listed(self) -> w.ListWorkersResponse:
        """Return what the router says of its workers."""
        request, metadata = w.ListWorkersRequest(), self.operator.metadata
        async with self.operator.open_channel(self.grpc) as channel:
            stub = RegistryStub(channel)
            return await stub.ListWorkers(request, metadata=metadata, timeout=WAIT_S)

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """Return the router's entries of its workers, by worker id."""
        return {entry.info.worker_id: entry for entry in (await self.listed()).workers}

    async def status(self, name: str) -> w.WorkerStatus:
        """Return what a worker says of itself."""
        return await self._status_of((await self.entries())[name])

    async def statuses(self) -> dict[str, w.WorkerStatus]:
        """Return what each worker says of itself."""
        entries = await self.entries()
        return {name: await self._status_of(entries[name]) for name in self.names}

    async def _status_of(self, entry: w.WorkerEntry) -> w.WorkerStatus:
        request, metadata = w.GetStatusRequest(), self.operator.metadata
        async with self.operator.open_channel(entry.info.address) as channel:
            return await WorkerStub(channel).GetStatus(request, metadata=metadata, timeout=WAIT_S)

    async def until_state(self, name: str, state: str) -> None:
        """Wait until the router reports `state` for a worker."""

        async def is_so() -> bool:
            return (await self.entries())[name].state == state

        await wait_until(is_so)

    async def until_ready(self) -> None:
        """Wait until the router can place work on every worker."""

        async def are_ready() -> bool:
            entries = await self.entries()
            return all(x in entries and entries[x].state == "ready" for x in self.names)

        await wait_until(are_ready, within_s=self.start_s)

    async def until_empty(self) -> None:
        """Wait until every worker is registered and has no open stream, no request, and only free
        blocks, and the router has no outstanding request. Raises AssertionError with the rest."""

        async def is_empty() -> bool:
            return not await self._left()

        with suppress(TimeoutError):
            await wait_until(is_empty)
        assert (left := await self._left()) == {}, left

    async def _left(self) -> dict[str, str]:
        entries = await self.entries()
        left = {name: "not registered" for name in self.names if name not in entries}
        for name in self.names - left.keys():
            status = await self._status_of(entries[name])
            free = status.load.free_blocks if status.HasField("load") else status.info.total_blocks
            used = status.info.total_blocks - free
            if status.open_streams or used or status.ledger != w.KvLedger():
                left[name] = f"{status.open_streams} streams, {used} blocks, {status.ledger}"
        for name, entry in entries.items():
            if entry.outstanding_requests or entry.outstanding_tokens:
                left[f"{name} at the router"] = f"{entry.outstanding_requests} requests"
        return left

    async def drain(self, name: str, *, timeout_s: float = WAIT_S, stop: bool = False) -> None:
        """Drain a worker as `pdserve drain` does, and assert that nothing is left on it."""
        request = a.DrainWorkerRequest(worker_id=name, timeout_s=timeout_s, stop=stop)
        metadata = self.operator.metadata
        async with self.operator.open_channel(self.grpc) as channel:
            call = AdminStub(channel).DrainWorker(request, metadata=metadata, timeout=2 * WAIT_S)
            steps = [x async for x in call]
        assert steps[-1].drained, steps[-1]

    async def undrain(self, name: str) -> None:
        """Undrain a worker as `pdserve undrain` does."""
        request, metadata = a.UndrainWorkerRequest(worker_id=name), self.operator.metadata
        async with self.operator.open_channel(self.grpc) as channel:
            await AdminStub(channel).UndrainWorker(request, metadata=metadata, timeout=WAIT_S)

    async def change_role(self, name: str, role: w.Role.ValueType) -> a.ChangeRoleResponse:
        """Change a worker's role as `pdserve role` does."""
        request = a.ChangeRoleRequest(worker_id=name, role=role, drain_timeout_s=WAIT_S)
        metadata = self.operator.metadata
        async with self.operator.open_channel(self.grpc) as channel:
            stub = AdminStub(channel)
            return await stub.ChangeRole(request, metadata=metadata, timeout=2 * WAIT_S)

    async def command(self, *words: str) -> int:
        """Run a `pdserve` command for the router in this process. Return its exit status."""
        key = ["--api-key", self.operator.token] if self.operator.token else []
        return await asyncio.to_thread(main, [*words, "--grpc", self.grpc, *key])

    async def metrics(self) -> str:
        """Return the router's page of metrics."""
        url = f"{self.url}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.text()
