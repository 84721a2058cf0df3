"""A worker whose deltas the test sends, over a real session on port 0, and a router over such
workers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from msgspec import structs

from pdserve import wire
from pdserve.background import background
from pdserve.config import (
    HealthConfig,
    ImagesConfig,
    QueueConfig,
    RetryConfig,
    RouterConfig,
    SloConfig,
)
from pdserve.errors import InvalidRequest
from pdserve.model.pixels import Pixels
from pdserve.net import deadline, framing, rpc
from pdserve.types import (
    EngineLimits,
    FinishReason,
    GenerateRequest,
    KvEndpoint,
    ModelInfo,
    PhaseReport,
    Role,
    SamplingParams,
    StreamDelta,
    WorkerInfo,
    WorkerLoad,
)
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from router.attempt.answer import AnswerDelta
from router.attempt.suspects import Suspicion
from router.fleet.billing import Billing
from router.fleet.checks import run_checks
from router.fleet.link_pool import LinkPool
from router.fleet.open import OpenedFleet
from router.fleet.registry import Fleet
from router.fleet.worker_link import LinkLimits
from router.metrics import RouterMetrics
from router.placement.policies import least_loaded
from router.request_path import NOT_PARSED, PathLimits, build_request_path
from router.steps.parse import ParseStep
from router.walk import Answered, RequestRecord, Walk
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    import grpc.aio

    from pdserve.config import TenantConfig
    from pdserve.errors import PdserveError
    from pdserve.types import TransferReport
    from router.attempt.answer import Out
    from router.fleet.member import Member
    from router.request_path import RequestPath
    from router.steps.parser_process import ParserProcess
    from router.walk import RequestStep

# A connection waits long for its worker, and reconnects quickly.
FAST_RECONNECTS = LinkLimits(WAIT_S, reconnect_min_s=0.005, reconnect_max_s=0.02)
PROMPT = tuple(range(1, 41))
MODEL = ModelInfo("demo", "/models/demo", max_model_len=4096, vocab_size=512, dtype="float32")

MEDIA_MIB = 1  # of the images of open requests


def worker_info(
    worker_id: str,
    role: Role,
    *,
    address: str = "127.0.0.1:1",
    instance_id: str = "e1",
    compatibility: str = "layout-a",
    **changes: Any,
) -> WorkerInfo:
    """Return the info of a worker of the model `demo` with room for 1,600 tokens."""
    info = WorkerInfo(
        worker_id=worker_id,
        instance_id=instance_id,
        role=role,
        model=MODEL,
        address=address,
        session_address="127.0.0.1:1",
        kv=None
        if role is Role.AGGREGATED
        else KvEndpoint(
            (f"kv-{worker_id}",), compatibility, {"block_size": "16"}, ("loopback",), copies=True
        ),
        block_size=16,
        total_blocks=100,
        limits=EngineLimits(8),
    )
    return replace(info, **changes)


def request(**changes: Any) -> GenerateRequest:
    """Return a request with 40 prompt tokens and at most 8 tokens of answer."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "model": "demo",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8),
        "deadline": deadline.after(600.0),
    }
    if media := changes.get("media"):
        values["pixels"] = Pixels(media)
        changes["media"] = tuple([x.without_data() for x in media])
    return GenerateRequest(**(values | changes))


class ScriptedWorker(WorkerServicer):
    """A worker that records commands and sends only what the test orders.

    `open` has the streams that are neither finished nor cancelled. `refused` is set when a Hello
    was refused, `ended` when the router's session has ended.
    """

    def __init__(self, worker_id: str, role: Role, **changes: Any) -> None:
        self.info = worker_info(worker_id, role, **changes)
        self.open: dict[int, w.Submit] = {}
        self.load: WorkerLoad | None = None
        self.accepts_hello = True
        self.answers_pings = True
        self.pinged = asyncio.Event()
        self.hellos = 0
        self.refused = asyncio.Event()
        self.ended = asyncio.Event()
        self._submits: asyncio.Queue[w.Submit] = asyncio.Queue()
        self._cancels: asyncio.Queue[int] = asyncio.Queue()
        self.renewed: asyncio.Queue[w.RenewResponse] = asyncio.Queue()
        self._session: _ScriptedSession | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedWorker]:
        """Listen on free ports and set the addresses."""
        server = rpc.make_server()
        add_WorkerServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        loop = asyncio.get_running_loop()
        sessions = await loop.create_server(lambda: _ScriptedSession(self), "127.0.0.1", 0)
        session_port = sessions.sockets[0].getsockname()[1]
        self.info = replace(
            self.info,
            address=f"127.0.0.1:{port}",
            session_address=f"127.0.0.1:{session_port}",
        )
        try:
            yield self
        finally:
            sessions.close()
            self.break_link()
            await server.stop(None)

    def greeted(self, session: _ScriptedSession, hello: w.Hello) -> None:
        """Record that a router has opened a session."""
        self.hellos += 1
        if not self.accepts_hello or hello.instance_id != self.info.instance_id:
            self.refused.set()
            error = InvalidRequest(f"this is instance {self.info.instance_id}", field="instance_id")
            session.send(w.StepFrame(closed=wire.error_to_pb(error)))
            session.transport.close()
            return
        self._session = session
        session.send(w.StepFrame(load=None if self.load is None else wire.load_to_pb(self.load)))

    def lost(self, session: _ScriptedSession) -> None:
        """Record that a session has ended."""
        if self._session is session:
            self._session = None
            self.open.clear()
            self.ended.set()

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> w.WorkerStatus:
        return w.WorkerStatus(info=wire.worker_to_pb(self.info), open_streams=len(self.open))

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> w.DrainResponse:
        return w.DrainResponse(drained=not self.open)

    def take(self, command: w.Command) -> None:
        """Record a command after the hello."""
        if command.HasField("submit"):
            self.open[command.submit.stream_id] = command.submit
            self._submits.put_nowait(command.submit)
        elif command.HasField("ping"):
            self.pinged.set()
            if self.answers_pings:
                self.send_frame(w.StepFrame(pong=command.ping))
        elif command.HasField("renewed"):
            self.renewed.put_nowait(command.renewed)
        else:
            self.open.pop(command.cancel.stream_id, None)
            self._cancels.put_nowait(command.cancel.stream_id)

    async def submitted(self) -> w.Submit:
        """Return the next submission that the test has not seen."""
        async with asyncio.timeout(WAIT_S):
            return await self._submits.get()

    async def cancelled(self) -> int:
        """Return the next cancelled stream id that the test has not seen."""
        async with asyncio.timeout(WAIT_S):
            return await self._cancels.get()

    @property
    def has_submissions(self) -> bool:
        return not self._submits.empty()

    def step(self, *deltas: StreamDelta, load: WorkerLoad | None = None) -> None:
        """Send one frame."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self.open.pop(delta.stream_id, None)
        frame = w.StepFrame()
        plain = [(x.stream_id, x.token_ids[0], x.text) for x in deltas if wire.is_plain(x)]
        if plain:
            frame.tokens.CopyFrom(wire.plain_to_pb(plain))
        frame.deltas.extend(wire.delta_to_pb(x) for x in deltas if not wire.is_plain(x))
        if load is not None:
            frame.load.CopyFrom(wire.load_to_pb(load))
        self.send_frame(frame)

    def send_frame(self, frame: w.StepFrame) -> None:
        """Send a frame as it is."""
        if self._session is not None:
            self._session.send(frame)

    def send(
        self,
        submit: w.Submit,
        *token_ids: int,
        finish: FinishReason | None = None,
        transfer: TransferReport | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        """Send tokens of one stream, with their numbers as text, and a report when it finishes."""
        report = None
        if finish is not None:
            report = PhaseReport(0.25, 0.5, 0.75, cached_tokens=4, transfer=transfer)
        self.step(
            StreamDelta(
                submit.stream_id,
                token_ids,
                "".join(f"<{token}>" for token in token_ids),
                finish_reason=finish,
                stop_reason=stop_reason,
                report=report,
            )
        )

    def fail(self, submit: w.Submit, error: PdserveError) -> None:
        """End one stream with an error."""
        self.step(
            StreamDelta(
                submit.stream_id,
                finish_reason=FinishReason.ERROR,
                error=wire.error_from_pb(wire.error_to_pb(error)),
            )
        )

    def break_link(self) -> None:
        """End the router's session."""
        if self._session is not None:
            self._session.transport.close()


class _ScriptedSession(asyncio.Protocol):
    """One session of a scripted worker."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._parser = framing.FrameParser(w.Command)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for command in self._parser.feed(data):
            if command.HasField("hello"):
                self._worker.greeted(self, command.hello)
            else:
                self._worker.take(command)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.lost(self)

    def send(self, frame: w.StepFrame) -> None:
        self.transport.write(framing.pack(frame))


class AnswerReader:
    """A client that reads the deltas of one answer. Its exit cancels the request."""

    def __init__(self, serving: Callable[[AnswerReader], Coroutine[Any, Any, None]]) -> None:
        self._deltas: asyncio.Queue[AnswerDelta] = asyncio.Queue()
        self._serving = asyncio.create_task(serving(self))

    def write(self, delta: AnswerDelta) -> bool:
        self._deltas.put_nowait(delta)
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])

    async def next(self) -> AnswerDelta:
        """Return the next delta. Raises the request's error if there is no more."""
        taking = asyncio.ensure_future(self._deltas.get())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([taking, self._serving], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done() and self._deltas.empty():
                taking.cancel()
                self._serving.result()
                raise AssertionError("the answer has ended")
            return await taking

    async def rest(self) -> AnswerDelta:
        """Return the rest of the answer as one delta."""
        async with asyncio.timeout(WAIT_S):
            await self._serving
        deltas = [self._deltas.get_nowait() for _ in range(self._deltas.qsize())]
        return structs.replace(
            deltas[-1],
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            text="".join(delta.text for delta in deltas),
        )


async def serve_parsed(
    process: ParserProcess,
    request: GenerateRequest,
    out: Out,
    serve: Callable[[GenerateRequest, Out], Awaitable[None]],
) -> None:
    """Answer a request by `serve` behind the step that parses answers."""

    async def proceed(walk: Walk) -> Answered:
        await serve(walk.request, walk.out)
        return Answered((), AnswerDelta())

    record = RequestRecord(
        request_id=request.request_id,
        model=request.model,
        tenant="",
        session="",
        service_class=request.service_class,
        prompt_tokens=1,
        arrived=0.0,
    )
    await ParseStep(process)(Walk(request, out, record, Suspicion()), proceed)


class RouterStack:
    """A fleet and the request path over scripted workers."""

    def __init__(self, requests: RequestPath, link_pool: LinkPool, metrics: RouterMetrics) -> None:
        self.fleet = requests.workers.fleet
        self.link_pool = link_pool
        self.requests = requests
        self.metrics = metrics

    def ask(self, request: GenerateRequest) -> AnswerReader:
        return AnswerReader(lambda out: self.requests.server.serve(request, out))

    def member(self, worker: ScriptedWorker) -> Member:
        return self.fleet.members[worker.info.worker_id]

    async def until_state(self, worker: ScriptedWorker, state: str) -> None:
        """Wait until the pool reports `state` for a worker."""
        until = asyncio.get_running_loop().time() + WAIT_S
        while self.member(worker).state != state:
            assert await self.fleet.capacity_change(until=until)

    async def join(self, *workers: ScriptedWorker) -> None:
        for worker in workers:
            self.fleet.register(worker.info)
        for worker in workers:
            await self.until_state(worker, "ready")

    def assert_no_leaks(self) -> None:
        """Assert that nothing is open, outstanding, reserved, running or queued."""
        assert not self.requests.log.open
        assert (self.requests.admission.running, self.requests.admission.queued) == (0, 0)
        assert not any(link.open_streams for link in self.link_pool.links.values())
        for member in self.fleet.members.values():
            assert member.placed.outstanding_requests == 0, member
            assert member.placed.outstanding_tokens == 0, member
            assert member.placed.reserved_blocks == 0, member


class Clock:
    """A clock that the test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


IMPATIENT, RETRY = QueueConfig(timeout_s=0.1), RetryConfig()


@asynccontextmanager
async def running_stack(
    *workers: ScriptedWorker,
    health: HealthConfig | None = None,
    retry: RetryConfig = RETRY,
    tenants: Sequence[TenantConfig] = (),
    queue: QueueConfig = IMPATIENT,
    prefill_chunks_ahead: int = 0,
    decisions_kept: int = 0,
    parse: RequestStep = NOT_PARSED,
) -> AsyncIterator[RouterStack]:
    """Run a stack and assert at the end that nothing leaked. By default the fleet detects no
    stalls."""
    async with AsyncExitStack() as exits:
        for worker in workers:
            await exits.enter_async_context(worker.serving())
        # No test outlives this lease, unless it sets the clock.
        fleet = Fleet(lease_s=3600.0, health=health or HealthConfig(stall_s=0.0))
        link_pool = LinkPool(fleet, router_id="router-1", limits=FAST_RECONNECTS)
        await exits.enter_async_context(link_pool)
        metrics = RouterMetrics(SloConfig())
        billing = Billing({}, metrics.count)
        checks = partial(run_checks, fleet, link_pool, billing)
        await exits.enter_async_context(background("checks", checks))
        config = RouterConfig(
            queue=queue,
            retry=retry,
            tenants=list(tenants),
            images=ImagesConfig(memory_mib=MEDIA_MIB, disk_mib=0),
        )
        path = build_request_path(
            config,
            OpenedFleet(fleet, link_pool, billing),
            metrics,
            {},
            parse=parse,
            limits=PathLimits(
                prefill_chunks_ahead=prefill_chunks_ahead,
                policy=least_loaded,
                decisions_kept=decisions_kept,
            ),
        )
        await exits.enter_async_context(background("admit", path.admit_queued))
        metrics.watch(fleet, path.admission, None, path.shares, tuple, tuple)
        stack = RouterStack(path, link_pool, metrics)
        await stack.join(*workers)
        yield stack
        stack.assert_no_leaks()
