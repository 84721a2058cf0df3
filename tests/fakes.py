"""A worker whose every delta is sent by the test, over a real session on port 0, and a router
over such workers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast
from unittest.mock import patch

from msgspec import structs

from pdserve import framing, rpc, wire
from pdserve.config import HealthConfig, SloConfig
from pdserve.errors import InvalidRequest
from pdserve.types import (
    FinishReason,
    KvEndpoint,
    ModelInfo,
    PhaseReport,
    Role,
    StreamDelta,
    WorkerInfo,
    WorkerLoad,
)
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from router.accounting import Accounting
from router.admission import AdmissionController, AdmissionLimits
from router.background import background
from router.fleet import connection
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.placement.cost import CostModel
from router.placement.policies import least_loaded
from router.placer import Placer
from router.request import RequestServer, Services
from router.retry import RetryBudget
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from contextlib import AbstractContextManager

    import grpc.aio

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, TransferReport
    from router.admission import Tenants
    from router.answer import AnswerDelta
    from router.decisions import DecisionLog
    from router.fleet.member import Member

MODEL = ModelInfo("demo", "/models/demo", max_model_len=4096, vocab_size=512, dtype="float32")


def worker_info(
    worker_id: str,
    role: Role,
    *,
    address: str = "127.0.0.1:1",
    instance_id: str = "e1",
    compatibility: str = "layout-a",
    **changes: Any,
) -> WorkerInfo:
    """A worker of the model `demo` with room for 1,600 tokens."""
    info = WorkerInfo(
        worker_id=worker_id,
        instance_id=instance_id,
        role=role,
        model=MODEL,
        address=address,
        session_address="127.0.0.1:1",
        kv=None
        if role is Role.AGGREGATED
        else KvEndpoint((f"kv-{worker_id}",), compatibility, {"block_size": "16"}, ("loopback",)),
        block_size=16,
        total_blocks=100,
        max_num_seqs=8,
    )
    return replace(info, **changes)


class ScriptedWorker(WorkerServicer):
    """Records what it is told and says what the test tells it to.

    `open` holds the streams that it has neither finished nor seen cancelled. `refused` and `ended`
    are set when a Hello was refused and when the router's stream was over.
    """

    def __init__(self, worker_id: str, role: Role, **changes: Any) -> None:
        self.info = worker_info(worker_id, role, **changes)
        self.open: dict[int, w.Submit] = {}
        self.load: WorkerLoad | None = None
        self.accepts_hello = True
        self.hellos = 0
        self.refused = asyncio.Event()
        self.ended = asyncio.Event()
        self._submits: asyncio.Queue[w.Submit] = asyncio.Queue()
        self._cancels: asyncio.Queue[int] = asyncio.Queue()
        self._session: _ScriptedSession | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedWorker]:
        """Listen on free ports and know the addresses."""
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
        """A router has opened a session."""
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
        """A session has ended."""
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
        """A command after the hello."""
        if command.HasField("submit"):
            self.open[command.submit.stream_id] = command.submit
            self._submits.put_nowait(command.submit)
        else:
            self.open.pop(command.cancel.stream_id, None)
            self._cancels.put_nowait(command.cancel.stream_id)

    async def submitted(self) -> w.Submit:
        """The next submission that the test has not seen."""
        async with asyncio.timeout(WAIT_S):
            return await self._submits.get()

    async def cancelled(self) -> int:
        """The next cancelled stream id that the test has not seen."""
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
        """Tokens of one stream, whose text is their numbers; with a report when it finishes."""
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


class Reader:
    """A client: the deltas of one answer, as they come. Leaving it cancels the request."""

    def __init__(self, serving: Callable[[Reader], Coroutine[Any, Any, None]]) -> None:
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
        """Raises the error of the request if no delta comes any more."""
        taking = asyncio.ensure_future(self._deltas.get())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([taking, self._serving], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done() and self._deltas.empty():
                taking.cancel()
                self._serving.result()
                raise AssertionError("the answer has ended")
            return await taking

    async def rest(self) -> AnswerDelta:
        """All that is left of an answer, as one delta."""
        async with asyncio.timeout(WAIT_S):
            await self._serving
        deltas = [self._deltas.get_nowait() for _ in range(self._deltas.qsize())]
        return structs.replace(
            deltas[-1],
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            text="".join(delta.text for delta in deltas),
        )


class Stack:
    """A fleet and the request path over scripted workers."""

    def __init__(self, fleet: Fleet, requests: RequestServer, metrics: RouterMetrics) -> None:
        self.fleet = fleet
        self.requests = requests
        self.metrics = metrics

    def ask(self, request: GenerateRequest) -> Reader:
        return Reader(lambda out: self.requests.serve(request, out))

    def member(self, worker: ScriptedWorker) -> Member:
        return self.fleet.members[worker.info.worker_id]

    async def until_state(self, worker: ScriptedWorker, state: str) -> None:
        """Wait until the pool says that a worker is in `state`."""
        until = asyncio.get_running_loop().time() + WAIT_S
        while self.member(worker).state != state:
            assert await self.fleet.capacity_change(until=until)

    async def join(self, *workers: ScriptedWorker) -> None:
        for worker in workers:
            self.fleet.register(worker.info)
        for worker in workers:
            await self.until_state(worker, "ready")

    def assert_no_leaks(self) -> None:
        """Nothing is open, outstanding, reserved, running or queued."""
        assert self.requests.open_requests == 0
        assert (self.requests.admission.running, self.requests.admission.queued) == (0, 0)
        assert self.fleet.open_streams == 0
        for member in self.fleet.members.values():
            assert member.outstanding_requests == 0, member
            assert member.outstanding_tokens == 0, member
            assert member.reserved_blocks == 0, member


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fast_reconnects() -> AbstractContextManager[object]:
    """Let routers wait long for a worker, and little before they connect again."""
    return patch.multiple(
        connection, ATTACH_TIMEOUT_S=WAIT_S, BACKOFF_MIN_S=0.005, BACKOFF_MAX_S=0.02
    )


@asynccontextmanager
async def running_stack(
    *workers: ScriptedWorker,
    health: HealthConfig | None = None,
    retry_tokens_per_s: float = 20000.0,
    limits: AdmissionLimits | None = None,
    tenants: Tenants | None = None,
    queue_timeout_s: float = 0.1,
    prefill_chunks_ahead: int = 0,
    decisions: DecisionLog | None = None,
) -> AsyncIterator[Stack]:
    """By default the fleet finds no stalls. Ends by asserting that nothing leaked."""
    async with AsyncExitStack() as exits:
        exits.enter_context(fast_reconnects())
        for worker in workers:
            await exits.enter_async_context(worker.serving())
        # A lease that no test outlives, unless it asks for its end.
        fleet = Fleet(
            router_id="router-1",
            lease_s=3600.0,
            health=health or HealthConfig(stall_s=0.0),
        )
        await exits.enter_async_context(fleet)
        metrics = RouterMetrics(SloConfig())
        admission = AdmissionController(
            limits or AdmissionLimits(queue_timeout_s=queue_timeout_s), tenants=tenants
        )
        costs = CostModel(fleet, SloConfig(), fleet.now)
        services = Services(
            fleet,
            admission,
            Placer(fleet, least_loaded, log=decisions, prefill_chunks_ahead=prefill_chunks_ahead),
            costs,
            metrics,
            Accounting({}, metrics.count),
            RetryBudget(retry_tokens_per_s),
            queue_timeout_s,
        )
        requests = RequestServer(services)
        await exits.enter_async_context(background("admit", requests.admit_queued))
        metrics.watch(fleet, admission, None, tuple, tuple)
        stack = Stack(fleet, requests, metrics)
        await stack.join(*workers)
        yield stack
        stack.assert_no_leaks()
