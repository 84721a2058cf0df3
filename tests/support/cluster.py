"""A whole service in one process: the real router and real workers with fake engines, connected by
gRPC and HTTP over loopback, all on free ports.

    async with Cluster(prefill=1, decode=2) as cluster:
        answer = await cluster.ask([20, 21, 22])

`__aexit__` asserts that nothing leaked, unless the test has failed already.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, cast

import aiohttp

from pdserve.cli import main
from pdserve.client import Client
from pdserve.config import HealthConfig, KvConfig, RouterConfig, TopologyConfig, WorkerConfig, parse
from pdserve.net import rpc
from pdserve.types import MediaItem, Role, SamplingParams
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub
from router.main import DEFAULT_LIMITS, RouterLimits, RouterServer
from tests.support.timeouts import WAIT_S, wait_until
from workers.control.worker_drain import DrainTiming
from workers.engine import AggregatedPhase, Work
from workers.fake.engine import FakeEngine
from workers.fake.sequence import Sequence as FakeSequence
from workers.fake.settings import FakeFaults
from workers.make_engine import make_engine
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
    from types import TracebackType

    from pdserve.client import Delta
    from pdserve.types import FinishReason, Receipt, Usage

# Longer than any pause of the machine. No test waits for the end of a lease.
LEASE_S = 60.0
_DRAIN_TIMING = DrainTiming()
PROMPT = list(range(20, 90))
PLAIN = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
LONG = replace(PLAIN, max_tokens=400)


@dataclass(slots=True)
class Answer:
    """The part of an answer that the client has received so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    receipt: Receipt | None = None
    experts: bytes = b""

    @property
    def fallbacks(self) -> tuple[str, ...]:
        assert self.receipt is not None
        return self.receipt.fallbacks


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.finish_reason is expected.finish_reason


class Trigger:
    """Sets `fired` once an answer has this many tokens."""

    def __init__(self, tokens: int) -> None:
        self.fired = asyncio.Event()
        self._tokens = tokens

    def __call__(self, answer: Answer) -> None:
        if len(answer.token_ids) >= self._tokens:
            self.fired.set()


def fake_answer(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    adapter: str = "",
    media: Sequence[MediaItem] = (),
) -> Answer:
    """Return the answer of an undisturbed fake engine."""
    ids = tuple(token_ids)
    work = Work(
        1, "expected", ids, sampling, AggregatedPhase(), adapter=adapter, media=tuple(media)
    )
    sequence, answer = FakeSequence(work, vocab_size), Answer()
    while answer.finish_reason is None:
        delta = sequence.advance(0.0)
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason
    return answer


class Cluster:
    """A router and its workers, named prefill-0, decode-0, aggregated-0, ...

    `engine_args` apply to every fake engine (workers/fake/settings.py). `router` and `worker`
    override the configuration of the router and of every worker. Workers also register with
    `other_routers`, which need not exist.
    """

    def __init__(
        self,
        *,
        prefill: int = 0,
        decode: int = 0,
        aggregated: int = 0,
        pooling: int = 0,
        encode: int = 0,
        engine_args: dict[str, object] | None = None,
        router: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        other_routers: Sequence[str] = (),
        drain_timing: DrainTiming = _DRAIN_TIMING,
        limits: RouterLimits = DEFAULT_LIMITS,
    ) -> None:
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        counts |= {Role.AGGREGATED: aggregated, Role.POOLING: pooling, Role.ENCODE: encode}
        self._roles = {f"{role}-{i}": role for role, n in counts.items() for i in range(n)}
        # Steps without any duration would starve everything else on this one event loop.
        self._engine_args = {"step_s": 0.001, **(engine_args or {})}
        self._router_values: dict[str, Any] = {
            "http": {"port": 0},
            "grpc": {"port": 0},
            "lease_s": LEASE_S,
            "stop_grace_s": 0.0,
            # The default policy learns, so placement would depend on earlier requests.
            "policy": "least_loaded",
            "health": HealthConfig(stall_s=LEASE_S),
            **(router or {}),
        }
        self._worker_values = worker or {}
        self._other_routers = tuple(other_routers)
        self._drain_timing, self._limits = drain_timing, limits
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
        """Request an answer over gRPC and return it. Call `on_token` after each delta."""
        answer = Answer()
        deltas = self.client.generate(token_ids, sampling, **values)
        # The object is an async generator, which its type hides. Closing it cancels the request.
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                answer.token_ids += delta.token_ids
                answer.text += delta.text
                answer.finish_reason = delta.finish_reason
                answer.usage, answer.receipt = delta.usage, delta.receipt
                if delta.routed_experts is not None:
                    answer.experts += delta.routed_experts.ids
                on_token(answer)
        return answer

    def expected(
        self, token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> Answer:
        """Return the answer of one undisturbed engine."""
        vocab_size = next(iter(self.workers.values())).info.model.vocab_size
        return fake_answer(token_ids, sampling, vocab_size, adapter)

    def busy(self, *names: str) -> list[str]:
        """Return the named workers that have an open stream."""
        return [x for x in names if self.workers[x].service.open_streams]

    def faults(self, name: str, faults: FakeFaults) -> None:
        """Set the faults of one worker's engine from now on."""
        self._engines[name].faults = faults

    def engine(self, name: str) -> FakeEngine:
        """Return the engine of a worker."""
        return self._engines[name]

    def crash(self, name: str) -> None:
        """Crash the engine of a worker. The worker reports it and waits to be stopped."""
        self._engines[name].crash()

    async def kill(self, name: str) -> None:
        """Stop a worker without a drain: every stream and transfer is cut."""
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
        region: str = "",
        model_name: str = "",
    ) -> WorkerServer:
        """Start another worker; `until_ready` waits for it. `engine_args` override those of the
        cluster. `model_name`: of another model than the cluster's."""
        named = {"model_names": (model_name,)} if model_name else {}
        config = WorkerConfig(
            worker_id=name,
            role=role,
            engine="fake",
            routers=(self.grpc, *self._other_routers),
            kv=KvConfig(hold_s=LEASE_S),
            revision=revision,
            engine_args={**self._engine_args, **(engine_args or {})},
            **{"topology": TopologyConfig(region=region), **self._worker_values, **named},
        )
        instance_id = f"{name}-instance-{len(self._engines)}"
        engine = make_engine(config, instance_id)
        assert isinstance(engine, FakeEngine)
        server = WorkerServer(
            config, engine=engine, instance_id=instance_id, drain_timing=self._drain_timing
        )
        await server.start()
        self._stack.push_async_callback(server.stop)
        self._engines[name], self.workers[name] = engine, server
        return server

    async def start_router(self) -> None:
        """Start the router. After a stop, it uses its former addresses."""
        self.router = RouterServer(parse(RouterConfig, self._router_values), self._limits)
        addresses = await self.router.start()
        self.http, self.grpc = addresses.http, addresses.grpc
        for key, address in (("http", self.http), ("grpc", self.grpc)):
            self._router_values[key] = {"port": int(address.rpartition(":")[2])}

    async def _stop_router(self) -> None:
        await self.router.stop()

    def probes(self) -> tuple[int, int]:
        """Return the numbers of passed and failed probes of pairs by the router."""
        counts = self.router.metrics._counts["pair_probes"]
        passed, failed = (counts["pdserve-demo", x] for x in ("passed", "failed"))
        return int(passed), int(failed)

    async def roles(self) -> w.ModelNote:
        """Return the role targets of the router's autoscaler for its one model."""
        reply = await self._registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
        (roles,) = reply.roles
        return roles

    async def entries(self) -> dict[str, w.WorkerEntry]:
        """Return the router's entries of its workers, by worker id."""
        reply = await self._registry.ListWorkers(w.ListWorkersRequest(), timeout=WAIT_S)
        return {entry.info.worker_id: entry for entry in reply.workers}

    async def command(self, *words: str) -> int:
        """Run a `pdserve` command for this router in this process. Return its exit status."""
        return await asyncio.to_thread(main, [*words, "--grpc", self.grpc])

    async def metrics(self) -> str:
        """Return the router's page of metrics."""
        url = f"http://{self.http}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.text()

    async def until_state(self, name: str, state: str) -> None:
        """Wait until the router reports `state` for a worker."""

        async def is_so() -> bool:
            return (await self.entries())[name].state == state

        await wait_until(is_so)

    async def until_ready(self) -> None:
        """Wait until the router can place work on every started worker."""

        async def is_ready() -> bool:
            entries = await self.entries()
            return all(x in entries and entries[x].state == "ready" for x in self.workers)

        await wait_until(is_ready)

    async def assert_no_leaks(self) -> None:
        """Wait until no live worker has an open stream or a pinned block, and the router has no
        outstanding request. Raises AssertionError with the leaks."""

        async def is_empty() -> bool:
            return not await self._leaks()

        with suppress(TimeoutError):
            await wait_until(is_empty)
        assert (leaks := await self._leaks()) == {}, leaks

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


async def ask_and_hold(
    cluster: Cluster, sampling: SamplingParams = LONG, role: str = "decode"
) -> tuple[str, str, asyncio.Task[Answer]]:
    """Send a request, and stall both workers of the role: decode after some tokens, prefill at its
    first step. Return the worker that has the request, the other worker, and the answer's task."""
    names = (f"{role}-0", f"{role}-1")
    for name in names:
        cluster.faults(name, FakeFaults(stall_at_step=1 if role == "prefill" else 30))
    trigger = Trigger(20)
    asking = asyncio.create_task(cluster.ask(PROMPT, sampling, on_token=trigger))
    if role == "decode":
        await asyncio.wait_for(trigger.fired.wait(), WAIT_S)
    await wait_until(lambda: cluster.busy(*names))
    (busy,) = cluster.busy(*names)
    return busy, names[1 - names.index(busy)], asking


async def replace_workers(cluster: Cluster, names: Sequence[str]) -> None:
    """Drain and stop each worker in turn, and start another one with its name."""
    for name in names:
        assert await cluster.command("drain", name, "--timeout", "0.05", "--stop") == 0
        server = cluster.workers.pop(name)
        assert server.readiness.stop_requested.done()
        await server.stop()  # what its process does when `stop_requested` is done
        await cluster.add(name, Role(name.partition("-")[0]))
        await cluster.until_ready()


@asynccontextmanager
async def under_load(
    cluster: Cluster,
    clients: int = 6,
    prompt: Sequence[int] = PROMPT,
    plain: SamplingParams = PLAIN,
    *,
    client: Client | None = None,
) -> AsyncIterator[list[int]]:
    """Run clients that send one request after the other and check each answer. Yield the number of
    answers of each client."""
    service = client or cluster.client
    counts, is_over = [0] * clients, False

    async def ask(i: int) -> None:
        while not is_over:
            # Several outputs are not continued at another router.
            n = 1 if client else 1 + i % 3
            sampling = replace(plain, seed=1000 * i + counts[i], n=n)
            tokens: list[list[int]] = [[] for _ in range(sampling.n)]
            async for delta in service.generate(prompt, sampling):
                tokens[delta.index] += delta.token_ids
            for index, found in enumerate(tokens):
                assert found == cluster.expected(prompt, sampling.of_choice(index)).token_ids
            counts[i] += 1

    asking = [asyncio.create_task(ask(i)) for i in range(clients)]
    try:
        yield counts
    finally:
        is_over = True
        await asyncio.gather(*asking)
