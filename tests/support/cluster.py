"""A whole service: the real router and real workers, connected by gRPC and HTTP over loopback, all
on free ports. Its engines are fake and in this process, or vLLM, a process each.

    async with Cluster(prefill=1, decode=2) as cluster:
        answer = await cluster.ask([20, 21, 22])

`__aexit__` asserts that nothing is left, unless the test has failed already.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

from pdserve.client import Client
from pdserve.config import HealthConfig, RouterConfig, parse
from pdserve.types import MediaItem, Role, SamplingParams
from router.main import DEFAULT_LIMITS, RouterLimits, RouterServer
from tests.support.open_request import OpenRequest
from tests.support.service import Service
from tests.support.started_workers import FAKE, LEASE_S, FakeWorker
from tests.support.timeouts import WAIT_S, wait_until
from workers.engine import AggregatedPhase, Work
from workers.fake.sequence import Sequence as FakeSequence
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Mapping,
        Sequence,
        Set,
    )
    from types import TracebackType

    from pdserve.client import Delta
    from pdserve.types import FinishReason, Receipt, Usage
    from pdserve.v1 import worker_pb2 as w
    from tests.support.started_workers import Engine, StartedWorker
    from workers.fake.engine import FakeEngine
    from workers.server import WorkerServer

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


class Cluster(Service):
    """A router in this process and its workers, named prefill-0, decode-0, aggregated-0, ...

    `engine` says how workers are started, and `engine_args` apply to every engine. `router` and
    `worker` override the configuration of the router and of every worker. Workers also register
    with `other_routers`, which need not exist.
    """

    def __init__(
        self,
        *,
        prefill: int = 0,
        decode: int = 0,
        aggregated: int = 0,
        pooling: int = 0,
        encode: int = 0,
        engine: Engine = FAKE,
        engine_args: Mapping[str, object] = MappingProxyType({}),
        router: Mapping[str, Any] = MappingProxyType({}),
        worker: Mapping[str, Any] = MappingProxyType({}),
        other_routers: Sequence[str] = (),
        limits: RouterLimits = DEFAULT_LIMITS,
    ) -> None:
        counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        counts |= {Role.AGGREGATED: aggregated, Role.POOLING: pooling, Role.ENCODE: encode}
        self._first = [f"{role}-{i}" for role, n in counts.items() for i in range(n)]
        self._engine, self._limits = engine, limits
        self._engine_args = {**engine.engine_args, **engine_args}
        self._router_values: dict[str, Any] = {
            "http": {"port": 0},
            "grpc": {"port": 0},
            "lease_s": LEASE_S,
            "stop_grace_s": 0.0,
            # The default policy learns, so placement would depend on earlier requests.
            "policy": "least_loaded",
            "health": HealthConfig(stall_s=LEASE_S),
            **router,
        }
        self._worker_values, self._other_routers = {**engine.worker, **worker}, [*other_routers]
        self._stack = AsyncExitStack()
        self._workers: dict[str, StartedWorker] = {}
        self._fakes: dict[str, FakeEngine] = {}
        self.start_s = engine.start_s
        self.router: RouterServer
        self.http: str
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
        async with self._stack:
            if kind is None:
                await self.until_empty()
            await asyncio.gather(*(worker.end() for worker in self._workers.values()))

    async def _start(self) -> None:
        await self.start_router()
        self._stack.push_async_callback(self._stop_router)
        self.client = await self._stack.enter_async_context(Client(self.grpc))
        for name in self._first:
            await self.add(name)
        await self.until_ready()

    async def start_router(self) -> None:
        """Start the router. After a stop, it uses its former addresses."""
        self.router = RouterServer(parse(RouterConfig, self._router_values), self._limits)
        addresses = await self.router.start()
        self.http, self.grpc = addresses.http, addresses.grpc
        self.url = f"http://{self.http}"
        for key, address in (("http", self.http), ("grpc", self.grpc)):
            self._router_values[key] = {"port": int(address.rpartition(":")[2])}

    async def _stop_router(self) -> None:
        await self.router.stop()

    async def add(
        self,
        name: str,
        role: Role | None = None,
        *,
        engine_args: Mapping[str, object] = MappingProxyType({}),
        **values: Any,
    ) -> None:
        """Start another worker, by default of the role in its name; `until_ready` waits for it.
        `engine_args` and `values` of its configuration override those of the cluster."""
        started = self._engine.start(
            {
                "worker_id": name,
                "role": role or Role(name.partition("-")[0]),
                "routers": [self.grpc, *self._other_routers],
                "engine_args": {**self._engine_args, **engine_args},
                **self._worker_values,
                **values,
            }
        )
        worker = self._workers[name] = await self._stack.enter_async_context(started)
        if isinstance(worker, FakeWorker):
            self._fakes[name] = worker.engine

    @property
    def names(self) -> Set[str]:
        return self._workers.keys()

    @property
    def workers(self) -> dict[str, WorkerServer]:
        """The workers with fake engines, which run in this process."""
        return {x: y.server for x, y in self._workers.items() if isinstance(y, FakeWorker)}

    def engine(self, name: str) -> FakeEngine:
        """Return the fake engine of a worker, also after its end."""
        return self._fakes[name]

    def faults(self, name: str, faults: FakeFaults) -> None:
        """Set the faults of one worker's fake engine from now on."""
        self._fakes[name].faults = faults

    def crash(self, name: str) -> None:
        """Crash the fake engine of a worker, which reports it and waits to be stopped."""
        self._fakes[name].crash()
        self.forget(name)

    def forget(self, name: str) -> None:
        """Expect a worker to be away from now on, because its engine has died."""
        del self._workers[name]

    def busy(self, *names: str) -> list[str]:
        """Return the named workers with fake engines that have an open stream."""
        return [x for x in names if self.workers[x].service.open_streams]

    def freeze(self, name: str) -> None:
        """Let a worker do nothing until `thaw`: SIGSTOP to a process."""
        self._workers[name].freeze()

    def thaw(self, name: str) -> None:
        self._workers[name].thaw()

    async def kill(self, name: str) -> None:
        """End a worker without a drain, as SIGKILL does: every stream and transfer is cut."""
        await self._workers.pop(name).kill()

    async def end(self, name: str) -> int:
        """End a worker as SIGTERM does. Return its exit code."""
        return await self._workers.pop(name).end()

    def open(self, ids: Sequence[int], sampling: SamplingParams, **values: Any) -> OpenRequest:
        """Request an answer, and return the running request."""
        return OpenRequest(self.client, ids, sampling, **values)

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
        """Return the answer of one undisturbed fake engine."""
        vocab_size = next(iter(self.workers.values())).info.model.vocab_size
        return fake_answer(token_ids, sampling, vocab_size, adapter)

    def probes(self) -> tuple[int, int]:
        """Return the numbers of passed and failed probes of pairs by the router."""
        counts = self.router.metrics._counts["pair_probes"]
        passed, failed = (counts["pdserve-demo", x] for x in ("passed", "failed"))
        return int(passed), int(failed)

    async def roles(self) -> w.ModelNote:
        """Return the role targets of the router's autoscaler for its one model."""
        (roles,) = (await self.listed()).roles
        return roles


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
        assert cluster.workers[name].readiness.stop_requested.done()
        await cluster.end(name)  # what its process does when `stop_requested` is done
        await cluster.add(name)
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
