"""A whole service on real vLLM: a router in this process, and each worker in its own process, so
that a test can kill or freeze it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.client import Client
from pdserve.config import GrpcConfig, HttpConfig, RouterConfig
from pdserve.net import rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminStub
from pdserve.v1.worker_pb2_grpc import RegistryStub, WorkerStub
from router.main import RouterServer
from tests.support.engine_pair import joined
from tests.support.processes import start_python
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.client import Delta
    from pdserve.process.forkserver import Forked
    from pdserve.types import Receipt, SamplingParams
    from tests.support.engine_pair import JoinedAnswer


@dataclass(slots=True)
class VllmCluster:
    """A router and its workers by name: prefill-0, decode-0, decode-1, ..."""

    http: str
    grpc: str
    client: Client
    registry: RegistryStub
    model: Path
    processes: dict[str, Forked] = field(default_factory=dict)

    @staticmethod
    @asynccontextmanager
    async def start(model: Path, **router_keys: Any) -> AsyncIterator[VllmCluster]:
        """Start the router alone, with these keys of RouterConfig. End all added workers at the
        exit."""
        # A worker on a busy machine may be late with its lease.
        keys: dict[str, Any] = {"policy": "least_loaded", "lease_s": 20.0, **router_keys}
        http, grpc_ = HttpConfig(port=0), GrpcConfig(port=0)
        config = RouterConfig(http=http, grpc=grpc_, stop_grace_s=0.0, **keys)
        async with AsyncExitStack() as stack:
            router = RouterServer(config)
            addresses = await router.start()
            stack.push_async_callback(router.stop)
            client = await stack.enter_async_context(Client(addresses.grpc))
            channel = await stack.enter_async_context(rpc.open_channel(addresses.grpc))
            service = VllmCluster(
                addresses.http, addresses.grpc, client, RegistryStub(channel), model
            )
            stack.push_async_callback(service._end_all)
            yield service

    async def add(
        self,
        name: str,
        *,
        adapters: str = "{}",
        adapter_directories: str = "[]",
        engine_args: str = "",
        tiers: str = "{}",
        weights_directories: str = "[]",
    ) -> None:
        """Start a worker; `until_ready` waits for it. All arguments but the name are YAML."""
        options = {
            "worker.worker_id": name,
            "worker.role": name.partition("-")[0],
            "worker.model": self.model,
            "worker.model_names": "[tiny]",
            "worker.routers": f"[{self.grpc}]",
            "worker.adapters": adapters,
            "worker.adapter_directories": adapter_directories,
            "worker.kv.tiers": tiers,
            "worker.weights_directories": weights_directories,
            "worker.engine_args": (
                "{dtype: float32, kv_cache_memory_bytes: 67108864, max_num_batched_tokens: 256"
                f"{engine_args}}}"
            ),
        }
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings = [x for key, value in options.items() for x in ("--set", f"{key}={value}")]
        self.processes[name] = await start_python("pdserve", "worker", *settings, env=env)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker."""
        self.processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL and wait for its end."""
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    async def drain(self, name: str, *, timeout_s: float, stop: bool) -> None:
        """Drain a worker as `pdserve drain` does, and assert that nothing is left on it."""
        request = a.DrainWorkerRequest(worker_id=name, timeout_s=timeout_s, stop=stop)
        async with rpc.open_channel(self.grpc) as channel:
            steps = [x async for x in AdminStub(channel).DrainWorker(request, timeout=WAIT_S)]
        assert steps[-1].drained, steps[-1]

    async def undrain(self, name: str) -> None:
        """Undrain a worker as `pdserve undrain` does."""
        async with rpc.open_channel(self.grpc) as channel:
            request = a.UndrainWorkerRequest(worker_id=name)
            await AdminStub(channel).UndrainWorker(request, timeout=WAIT_S)

    async def change_role(self, name: str, role: w.Role.ValueType) -> a.ChangeRoleResponse:
        """Change a worker's role as `pdserve role` does."""
        request = a.ChangeRoleRequest(worker_id=name, role=role, drain_timeout_s=WAIT_S)
        async with rpc.open_channel(self.grpc) as channel:
            return await AdminStub(channel).ChangeRole(request, timeout=2 * WAIT_S)

    async def ended(self, name: str) -> int:
        """Wait for the end of a worker and return its exit code."""
        return await asyncio.wait_for(self.processes.pop(name).wait(), WAIT_S)

    async def listed(self) -> w.ListWorkersResponse:
        return await self.registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """Return the router's entries of its workers, by worker id."""
        return {entry.info.worker_id: entry for entry in (await self.listed()).workers}

    async def until_ready(self) -> None:
        """Wait until the router can place work on all workers that were started and not killed."""

        async def is_ready() -> bool:
            entries = await self.entries()
            return all(x in entries and entries[x].state == "ready" for x in self.processes)

        await wait_until(is_ready, within_s=START_S, pause_s=0.05)

    async def status(self, name: str) -> w.WorkerStatus:
        """Return the status of a worker, as it says itself."""
        address = (await self.entries())[name].info.address
        async with grpc.aio.insecure_channel(address) as channel:
            return await WorkerStub(channel).GetStatus(w.GetStatusRequest(), timeout=WAIT_S)

    async def statuses(self) -> dict[str, w.WorkerStatus]:
        """Return the status of each live worker."""
        return {name: await self.status(name) for name in self.processes}

    async def until_empty(self) -> None:
        """Wait until no worker has a pinned block or a request, and the router has no outstanding
        request."""
        await wait_until(self._is_empty, pause_s=0.05)

    async def _is_empty(self) -> bool:
        ledgers = [status.ledger for status in (await self.statuses()).values()]
        entries = (await self.listed()).workers
        placed = [x.outstanding_requests or x.outstanding_tokens for x in entries]
        held = (x.pinned_blocks or x.transfers or x.engine_requests for x in ledgers)
        return not any(placed) and not any(held)

    async def _end_all(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), WAIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise


class OpenRequest:
    """One running request: its deltas, by answer."""

    def __init__(
        self, service: VllmCluster, ids: list[int], sampling: SamplingParams, model: str = ""
    ) -> None:
        self.pieces: list[list[Delta]] = [[] for _ in range(sampling.n)]
        self.last: Delta | None = None
        self._changed = asyncio.Event()
        self._deltas = service.client.generate(ids, sampling, model=model)
        self.task = asyncio.create_task(self._read())

    @property
    def answers(self) -> list[JoinedAnswer]:
        return [joined(*pieces) for pieces in self.pieces]

    @property
    def receipt(self) -> Receipt:
        assert self.last is not None
        assert self.last.receipt is not None
        return self.last.receipt

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return self.receipt.fallbacks

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(delta.token_ids) for pieces in self.pieces for delta in pieces)

    async def _read(self) -> None:
        async for delta in self._deltas:
            self.pieces[delta.index].append(delta)
            self.last = delta
            self._changed.set()

    async def end(self) -> list[JoinedAnswer]:
        """Wait for the last answer and return all."""
        await asyncio.wait_for(asyncio.shield(self.task), WAIT_S)
        return self.answers

    async def until(self, tokens: int) -> None:
        """Wait until the client has this many tokens, or all."""
        async with asyncio.timeout(WAIT_S):
            while self.tokens < tokens and not self.task.done():
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait((changed, self.task), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
