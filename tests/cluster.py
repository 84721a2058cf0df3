"""A whole service in one process: the real router and real workers with fake engines, joined by
gRPC and HTTP over loopback, every port a free one.

    async with Cluster(prefill=1, decode=2) as cluster:
        answer = await cluster.ask([20, 21, 22])

Leaving it asserts that nothing leaked, unless the test failed already.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from pdserve import rpc
from pdserve.client import Client
from pdserve.config import HealthConfig, KvConfig, RouterConfig, WorkerConfig
from pdserve.types import Role, SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from router.main import RouterServer
from tests.patience import WAIT_S
from workers.engine import AggregatedPhase, Work
from workers.engines import make_engine
from workers.fake.engine import FakeEngine
from workers.fake.engine import Sequence as FakeSequence
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from types import TracebackType

    from pdserve.client import Delta
    from pdserve.types import FinishReason, Receipt, Usage
    from workers.fake.settings import FakeFaults

# No test waits for the end of a lease; one that a pause of the machine cannot outlast.
LEASE_S = 60.0
_LOOK_S = 0.01


@dataclass(slots=True)
class Answer:
    """An answer as its client has it so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    receipt: Receipt | None = None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        assert self.receipt is not None
        return self.receipt.fallbacks


def fake_answer(
    token_ids: Sequence[int], sampling: SamplingParams, vocab_size: int, adapter: str = ""
) -> Answer:
    """What a fake engine says that nothing happens to."""
    work = Work(1, "expected", tuple(token_ids), sampling, AggregatedPhase(), adapter=adapter)
    sequence, answer = FakeSequence(work, vocab_size), Answer()
    while answer.finish_reason is None:
        delta = sequence.advance(0.0)
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason
    return answer


class Cluster:
    """Owns a router and its workers. Workers are named prefill-0, decode-0, aggregated-0, ...

    `engine_args` are those of every fake engine (workers/fake/settings.py), `router` goes over the
    router's configuration, `worker` over every worker's. Workers register with `other_routers` too,
    if they are there or not.
    """

    def __init__(
        self,
        *,
        prefill: int = 0,
        decode: int = 0,
        aggregated: int = 0,
        pooling: int = 0,
        engine_args: dict[str, object] | None = None,
        router: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        other_routers: Sequence[str] = (),
    ) -> None:
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        counts |= {Role.AGGREGATED: aggregated, Role.POOLING: pooling}
        self._roles = {f"{role}-{i}": role for role, n in counts.items() for i in range(n)}
        # A step that takes no time at all would starve all else on this one event loop.
        self._engine_args = {"step_s": 0.001, **(engine_args or {})}
        self._router_values: dict[str, Any] = {
            "http_port": 0,
            "grpc_port": 0,
            "lease_s": LEASE_S,
            "stop_grace_s": 0.0,
            # The default learns: which way a request goes would hang on what was asked before.
            "policy": "least_loaded",
            "health": HealthConfig(stall_s=LEASE_S),
            **(router or {}),
        }
        self._worker_values = worker or {}
        self._other_routers = tuple(other_routers)
        self._stack = AsyncExitStack()
        self._engines: dict[str, FakeEngine] = {}
        self.workers: dict[str, WorkerServer] = {}
        self.router: RouterServer
        self.http: str
        self.grpc: str
        self.client: Client

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                await self.assert_no_leaks()
        finally:
            await self._stack.aclose()

    async def ask(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        on_token: Callable[[Answer], None] = lambda _: None,
        **values: Any,
    ) -> Answer:
        """The whole answer over gRPC; `on_token` is called after each piece."""
        answer = Answer()
        deltas = self.client.generate(token_ids, sampling, **values)
        # An async generator behind its narrower type; closing it cancels the request.
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                answer.token_ids += delta.token_ids
                answer.text += delta.text
                answer.finish_reason = delta.finish_reason
                answer.usage, answer.receipt = delta.usage, delta.receipt
                on_token(answer)
        return answer

    def expected(
        self, token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> Answer:
        """What one engine that nothing happens to says."""
        vocab_size = next(iter(self.workers.values())).info.model.vocab_size
        return fake_answer(token_ids, sampling, vocab_size, adapter)

    def busy(self, *names: str) -> list[str]:
        """Those of the named workers that have a stream open."""
        return [x for x in names if self.workers[x].service.open_streams]

    def faults(self, name: str, faults: FakeFaults) -> None:
        """Scripts the faults of one worker's engine from now on."""
        self._engines[name].faults = faults

    def engine(self, name: str) -> FakeEngine:
        """The engine of a worker."""
        return self._engines[name]

    def crash(self, name: str) -> None:
        """The engine of a worker dies; the worker says so and waits to be stopped."""
        self._engines[name].crash()

    async def kill(self, name: str) -> None:
        """A worker breaks off: no drain, every stream and transfer cut."""
        server = self.workers.pop(name)
        await server.service.close()
        await server.stop()

    async def add(
        self,
        name: str,
        role: Role,
        *,
        engine_args: dict[str, object] | None = None,
        revision: str = "",
    ) -> WorkerServer:
        """Starts one more worker; `until_ready` waits for it. `engine_args` go over those of the
        cluster."""
        config = WorkerConfig(
            worker_id=name,
            role=role,
            engine="fake",
            routers=(self.grpc, *self._other_routers),
            kv=KvConfig(lease_s=LEASE_S),
            revision=revision,
            engine_args={**self._engine_args, **(engine_args or {})},
            **self._worker_values,
        )
        instance_id = f"{name}-instance-{len(self._engines)}"
        engine = make_engine(config, instance_id)
        assert isinstance(engine, FakeEngine)
        server = WorkerServer(config, engine=engine, instance_id=instance_id)
        await server.start()
        self._stack.push_async_callback(server.stop)
        self._engines[name], self.workers[name] = engine, server
        return server

    async def start_router(self) -> None:
        """Starts the router: at the addresses that it had before, where it was stopped."""
        self.router = RouterServer(RouterConfig(**self._router_values))
        addresses = await self.router.start()
        self.http, self.grpc = addresses.http, addresses.grpc
        for key, address in (("http_port", self.http), ("grpc_port", self.grpc)):
            self._router_values[key] = int(address.rpartition(":")[2])

    async def _stop_router(self) -> None:
        await self.router.stop()

    def probes(self) -> tuple[int, int]:
        """How many of the router's own requests over pairs went well, and how many did not."""
        counts = self.router.metrics._counts["pair_probes"]
        passed, failed = (counts["pdserve-demo", x] for x in ("passed", "failed"))
        return int(passed), int(failed)

    async def roles(self) -> w.ModelNote:
        """What the router, which moves roles by load, wants of its one model's workers."""
        reply = await self._registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
        (roles,) = reply.roles
        return roles

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """What the router says of its workers."""
        reply = await self._registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
        return {entry.info.worker_id: entry for entry in reply.workers}

    async def until(self, what: Callable[[], object]) -> None:
        """Waits until `what()` holds."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if what():
                    return
                await asyncio.sleep(_LOOK_S)

    async def until_state(self, name: str, state: str) -> None:
        """Waits until the router says that of a worker."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if (await self.entries())[name].state == state:
                    return
                await asyncio.sleep(_LOOK_S)

    async def until_ready(self) -> None:
        """Waits until the router can place work on every worker that was started."""
        async with asyncio.timeout(WAIT_S):
            while True:
                entries = await self.entries()
                if all(x in entries and entries[x].state == "ready" for x in self.workers):
                    return
                await asyncio.sleep(_LOOK_S)

    async def assert_no_leaks(self) -> None:
        """Nothing is open or pinned on any worker that lives, and the router has booked nothing."""
        leaks: dict[str, str] = {}
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    leaks = await self._leaks()
                    if not leaks:
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise AssertionError(f"leaked: {leaks}") from None

    async def _leaks(self) -> dict[str, str]:
        leaks = {}
        for name, server in self.workers.items():
            worker, ledger = server.service, server.service.ledger()
            if worker.open_streams or not ledger.is_empty:
                leaks[name] = f"{worker.open_streams} streams, {ledger}"
            load = worker.load()
            if load is not None and load.free_blocks != server.info.total_blocks:
                leaks[name] = f"{server.info.total_blocks - load.free_blocks} blocks"
        for name, entry in (await self.entries()).items():
            if entry.outstanding_requests or entry.outstanding_tokens:
                leaks[f"{name} at the router"] = f"{entry.outstanding_requests} requests"
        return leaks

    async def _start(self) -> None:
        await self.start_router()
        self._stack.push_async_callback(self._stop_router)
        channel = await self._stack.enter_async_context(rpc.open_channel(self.grpc))
        self._registry = RegistryStub(channel)
        self.client = await self._stack.enter_async_context(Client(self.grpc))
        for name, role in self._roles.items():
            await self.add(name, role)
        await self.until_ready()
