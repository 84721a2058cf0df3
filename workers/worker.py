"""One engine and the routers it works for, without gRPC.

Stream ids of routers are their own; the engine gets ids that are unique here. What the engine says
in a step goes to each router as one frame. Transitions are synchronous; only draining waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.cost_wire import moments_to_pb
from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PdserveError,
    Unavailable,
    WorkerFailed,
)
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import worker_pb2 as w
from workers import leg_span
from workers.cache_feed import CacheFeed
from workers.drain import Drain
from workers.engine import PrefillPhase
from workers.roles import RoleChange, RoleState
from workers.session import Session
from workers.submissions import deadline_s, work_from_pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kv_transfer.snapshot import KvState
    from pdserve.tracing import Span, Tracing
    from pdserve.types import KvLedger, KvReport, Role, StreamDelta, WorkerLoad
    from workers.cache_feed import CacheWatcher
    from workers.engine import Engine, EngineInfo

logger = logging.getLogger(__name__)

MAX_FRAMES = 1024
# How often, at most, a router is told anew what steps cost.
STEPS_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class _Stream:
    session: Session
    router_stream_id: int
    is_prefill: bool
    timer: asyncio.TimerHandle | None
    span: Span | None = None


async def _nobody() -> None:
    """There are no routers."""


class Worker:
    """State: attached sessions, open streams by engine id, whether new work is taken.

    `failed` gets the error of an engine that died. With `tracing` each stream is a span.
    """

    def __init__(self, engine: Engine, role: Role, *, max_frames: int = MAX_FRAMES) -> None:
        self.roles = RoleChange(role)
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.cache = CacheFeed()
        self.tracing: Tracing | None = None
        self._engine = engine
        self._max_frames = max_frames
        self._has_kv = False
        self._sessions: dict[str, Session] = {}
        self._streams: dict[int, _Stream] = {}
        self._ids = itertools.count(1)
        self._draining = False
        self.exported = 0  # streams that went on elsewhere with their KV
        self.on_change: Callable[[], None] = lambda: None  # routers should be told
        self.tell_routers: Callable[[], Awaitable[None]] = _nobody  # ends once they know
        self.unhealthy = ""  # what is wrong with its machine; routers are told
        self._closing = False
        self.idle = asyncio.Event()  # set while no stream is open
        self.idle.set()
        self._drain = Drain(self)

    async def start(self) -> EngineInfo:
        """Starts the engine; raises what that raises."""
        self._engine.on_cache(self.cache.changed)
        info = await self._engine.start(self._on_step, self._on_failure)
        self._has_kv = info.kv is not None
        return info

    @property
    def role(self) -> Role:
        return self.roles.role

    @property
    def is_draining(self) -> bool:
        """Whether it takes no work of everyone."""
        return self._draining or self.roles.state is not RoleState.SERVING

    @property
    def is_moving(self) -> bool:
        """Whether what is left should go on elsewhere now."""
        return self._drain.is_moving

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def load(self) -> WorkerLoad | None:
        return self._engine.load()

    def ledger(self) -> KvLedger:
        return self._engine.ledger()

    def kv_state(self) -> KvState | None:
        return self._engine.kv_state()

    def kv_report(self) -> KvReport | None:
        """The KV plane in figures, None where the worker moves no KV."""
        state = self.kv_state()
        return None if state is None else state.report()

    def attach(self, router_id: str) -> Session:
        """A new session. An older one of the same router is cut: its router has given it up.

        Raises Unavailable while the worker closes.
        """
        if self._closing:
            raise Unavailable("this worker is closing")
        older = self._sessions.get(router_id)
        if older is not None:
            older.cut(Unavailable(f"router {router_id} attached anew"))
            self.detach(older)
        session = self._sessions[router_id] = Session(router_id, max_frames=self._max_frames)
        load = self.load()
        if load is not None:
            session.load_told = load
            frame = w.StepFrame(load=wire.load_to_pb(load))
            self._tell_steps(session, frame, asyncio.get_running_loop().time())
            session.put(frame)
        return session

    def watch_cache(self, router_id: str) -> CacheWatcher:
        """A router's watch of the prefix cache; `cache.leave` ends it. Raises Unavailable while the
        worker closes, and Overloaded where too many watch."""
        if self._closing:
            raise Unavailable("this worker is closing")
        return self.cache.watch(router_id)

    def detach(self, session: Session) -> None:
        """The session is over: cancels all its work. Idempotent."""
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
            self.on_change()  # the router may be another one by now, which does not know us
        for stream_id in list(session.engine_ids):
            self.cancel(session, stream_id)

    def submit(self, session: Session, submit: w.Submit) -> None:
        """Gives work to the engine, or ends the request with the error that refuses it."""
        router_ids = [submit.stream_id, *(fork.stream_id for fork in submit.forks)]
        stream_ids = [next(self._ids) for _ in router_ids]
        try:
            if _is_taken(router_ids, session):
                raise InvalidRequest("stream_id is in use on this stream", field="stream_id")
            self._check_open(submit)
            work = work_from_pb(submit, stream_ids=stream_ids, role=self.role, has_kv=self._has_kv)
            seconds = deadline_s(submit)
        except PdserveError as error:
            for router_id in router_ids:
                self.refuse(session, router_id, error)
            return
        is_prefill = isinstance(work.phase, PrefillPhase)
        for router_id, stream_id in zip(router_ids, stream_ids, strict=True):
            timer = None
            if seconds is not None:
                loop = asyncio.get_running_loop()
                timer = loop.call_later(seconds, self._expire, stream_id, seconds)
            session.engine_ids[router_id] = stream_id
            span = None
            if self.tracing is not None:
                span = leg_span.begin(self.tracing, work, submit.traceparent)
            self._streams[stream_id] = _Stream(session, router_id, is_prefill, timer, span)
        self.idle.clear()
        self._engine.submit(work)

    def _check_open(self, submit: w.Submit) -> None:
        proves = self.roles.state is RoleState.PROVING and submit.probe and not self._draining
        is_open = self._drain.announces or not self.is_draining
        if self._closing or not (is_open or proves):
            raise Unavailable("this worker is draining")

    def refuse(self, session: Session, router_stream_id: int, error: PdserveError) -> None:
        """Ends a stream with `error`, whether or not it was opened."""
        self.cancel(session, router_stream_id)
        session.put(_end_frame(router_stream_id, error))

    def cancel(self, session: Session, router_stream_id: int) -> None:
        """Ends a stream without another word, or frees what a prefill that ended holds; unknown
        ones are ignored."""
        stream_id = session.engine_ids.get(router_stream_id)
        if stream_id is not None:
            self._forget(stream_id)
        else:
            stream_id = session.take_held(router_stream_id)
        if stream_id is not None:
            self._engine.cancel(stream_id)

    def export(self, session: Session, export: w.Export) -> None:
        """Ends a stream whose KV another worker is to fetch; unknown ones are ignored."""
        stream_id = session.engine_ids.get(export.stream_id)
        if stream_id is not None:
            self._engine.export(stream_id, export.transfer_id)

    def end_drain(self) -> None:
        """New work is taken again. Raises Unavailable where the engine has died or the worker
        closes."""
        if self._closing or self.failed.done():
            raise Unavailable("this worker is stopping")
        self._draining = False

    async def drain(self, timeout_s: float) -> tuple[bool, int]:
        """Takes no new work once the routers know, and waits until no stream is open and no block
        is pinned; what does not end in time goes on elsewhere: (whether nothing is left, how many
        streams that were)."""
        was_open, self._draining = not self.is_draining, True
        return await self._drain.empty(timeout_s, "this worker is draining", announces=was_open)

    async def change_role(self, role: Role, drain_timeout_s: float) -> int:
        """Ends all work, by moving what has not ended in time to other workers; returns how many
        streams that were. Then the role is `role`, and canaries are taken. Raises InvalidRequest,
        and Unavailable where blocks stay pinned: then the role is what it was."""
        self.roles.begin(role)
        try:
            is_empty, moved = await self._drain.empty(
                drain_timeout_s, "this worker changes its role", announces=not self._draining
            )
            if not is_empty:
                raise Unavailable(f"blocks are still pinned: {self.ledger()}")
        except BaseException:
            self.roles.give_up()
            raise
        self.roles.drained()
        return moved

    def end_streams(self, error: Unavailable) -> None:
        """Ends all that is open with `error`, and gives up what ended prefills hold."""
        for stream in list(self._streams.values()):
            self.refuse(stream.session, stream.router_stream_id, error)
        for session in self._sessions.values():
            for stream_id in session.take_all_held():
                self._engine.cancel(stream_id)

    def close_sessions(self) -> None:
        """Lets every session end behind the frames that are queued, and takes no new one."""
        self._draining = self._closing = True
        self.cache.close()
        for session in self._sessions.values():
            session.finish()

    async def close(self) -> None:
        """Cancels what is left and ends the engine. Idempotent."""
        self._draining = self._closing = True
        self.cache.close()
        for session in list(self._sessions.values()):
            session.cut(Unavailable("this worker has closed"))
            self.detach(session)
        await self._engine.close()

    def _on_step(self, deltas: Sequence[StreamDelta]) -> None:
        load = self._engine.load()
        load_pb = None if load is None else wire.load_to_pb(load)
        frames: dict[Session, w.StepFrame] = {}
        plain: dict[Session, list[tuple[int, int, str]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.stream_id)
            if stream is None:
                continue
            frame = frames.get(stream.session)
            if frame is None:
                frame = frames[stream.session] = w.StepFrame(load=load_pb)
            if wire.is_plain(delta):
                row = (stream.router_stream_id, delta.token_ids[0], delta.text)
                plain.setdefault(stream.session, []).append(row)
                continue
            message = wire.delta_to_pb(delta)
            message.stream_id = stream.router_stream_id
            frame.deltas.append(message)
            if delta.finish_reason is not None:
                if stream.is_prefill or delta.exported_tokens:
                    stream.session.hold(stream.router_stream_id)
                self.exported += delta.exported_tokens > 0
                self._forget(delta.stream_id, last=delta)
        now = asyncio.get_running_loop().time()
        for session, frame in frames.items():
            session.load_told = load
            if session in plain:
                frame.tokens.CopyFrom(wire.plain_to_pb(plain[session]))
            if now - session.steps_told_at >= STEPS_PERIOD_S:
                self._tell_steps(session, frame, now)
            session.put(frame)

    def _tell_steps(self, session: Session, frame: w.StepFrame, now: float) -> None:
        """Adds to the frame what steps cost; its router has known it since `now`."""
        moments = self._engine.step_moments()
        if moments is not None and (moments.prefill.steps or moments.decode.steps):
            session.steps_told_at = now
            frame.steps.CopyFrom(moments_to_pb(moments))

    def beat(self, session: Session) -> w.StepFrame | None:
        """A frame that says how the engine fares, and nothing else. None where the router waits for
        nothing and knows it: what it cancelled is gone from the engine some time later."""
        load = self.load()
        if load == session.load_told and not session.engine_ids:
            return None
        session.load_told = load
        return w.StepFrame(load=None if load is None else wire.load_to_pb(load))

    def _on_failure(self, error: BaseException) -> None:
        self._draining = True
        for stream_id, stream in list(self._streams.items()):
            failure = WorkerFailed("the worker's engine died")
            self._forget(stream_id, error=failure)
            stream.session.put(_end_frame(stream.router_stream_id, failure))
        if not self.failed.done():
            self.failed.set_result(error)

    def _expire(self, stream_id: int, seconds: float) -> None:
        stream = self._streams[stream_id]
        error = DeadlineExceeded(f"the request did not end within its {seconds:.3g} s")
        self._forget(stream_id, error=error)
        self._engine.cancel(stream_id)
        stream.session.put(_end_frame(stream.router_stream_id, error))

    def _forget(
        self,
        stream_id: int,
        *,
        last: StreamDelta | None = None,
        error: PdserveError | None = None,
    ) -> None:
        stream = self._streams.pop(stream_id)
        if stream.span is not None:
            leg_span.end(stream.span, last, error)
        del stream.session.engine_ids[stream.router_stream_id]
        if stream.timer is not None:
            stream.timer.cancel()
        if not self._streams:
            self.idle.set()


def _end_frame(router_stream_id: int, error: PdserveError) -> w.StepFrame:
    delta = w.StreamDelta(
        stream_id=router_stream_id,
        finish_reason=c.FINISH_REASON_ERROR,
        error=wire.error_to_pb(error),
    )
    return w.StepFrame(deltas=[delta])


def _is_taken(router_ids: Sequence[int], session: Session) -> bool:
    """Whether one of the ids names an open stream, or two of them the same."""
    return len(set(router_ids)) < len(router_ids) or any(
        x in session.engine_ids for x in router_ids
    )
