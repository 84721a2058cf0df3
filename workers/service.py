"""One engine and the routers that it works for.

A router opens a session: one connection over which its commands come in order, and over which it
gets one frame an engine step for all its requests. State changes are synchronous; only draining
waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar, cast

from pdserve import framing, wire
from pdserve.config import MOVE_S, UNPIN_S
from pdserve.dead_peer import detect_dead_peer
from pdserve.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    PdserveError,
    Unavailable,
    WorkerFailed,
)
from pdserve.prefix_hash import pack
from pdserve.types import ReasoningGate, Role, StreamDelta
from pdserve.v1 import worker_pb2 as w
from workers.accounting import WorkerAccount
from workers.adapters import read_adapter
from workers.engine import (
    AggregatedPhase,
    DecodePhase,
    Phase,
    PoolingPhase,
    PrefillPhase,
    Work,
    ended_by,
)
from workers.registration import Registrations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.snapshot import KvState
    from pdserve.security.roles import Guard
    from pdserve.telemetry import Span, Tracing
    from pdserve.types import Adapter, KvLedger, WorkerLoad
    from workers.engine import CacheChange, Engine, EngineInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A router closes a connection that does not say hello, and one that has not read all after `close`.
HELLO_S = 10.0
LINGER_S = 5.0
# Routers take a worker that says nothing for several of these for stalled.
BEAT_S = 0.5
# Least time between two reports of step costs to one router.
STEPS_PERIOD_S = 0.5
# How long a drain waits for routers to learn of it. One that answers does so in milliseconds.
ANNOUNCE_S = 1.0
# How often routers are told, while a drain moves requests, what is left.
_MOVE_PERIOD_S = 0.5
# The reason of waste of an active health check.
_PROBE = "probe"
# The engine does not say when a lease ends, so the ledger is polled.
_LEDGER_POLL_S = 0.02
# A role change that nobody settles in this time is undone: the router that asked for it is gone.
SETTLE_S = 60.0
# Before the hello, a peer may be anybody.
_HELLO_BYTES = 1 << 12
_MAX_STRANGERS = 64
# Ended prefills whose blocks a drain gives up; those of others end with their lease.
_MAX_HELD = 4096
# Blocks in one frame of a snapshot; a router needs half a millisecond to read them.
_SNAPSHOT_PART = 1 << 12


class RoleState(StrEnum):
    """A worker takes requests while SERVING, and only the router's probe while PROVING.

    serving ── change_role ──► draining ── empty ──► proving ── settle(keep) ──► serving, new role
                                  │ not empty            │ settle(not keep)
                                  └──────────────────────┴──► serving, former role
    """

    SERVING = "serving"
    DRAINING = "draining"
    PROVING = "proving"


@dataclass(frozen=True, slots=True)
class _Stream:
    session: Session
    router_stream_id: int
    is_prefill: bool
    is_probe: bool
    span: Span | None
    adapter: str


class WorkerService:
    """State: sessions by router, open streams by the engine's stream id, the role, and the drain.

    `failed` gets the error of an engine that died.
    """

    def __init__(
        self,
        engine: Engine,
        role: Role,
        instance_id: str,
        *,
        routers: Registrations | None = None,
        guard: Guard | None = None,
        tracing: Tracing | None = None,
        draining: bool = False,
    ) -> None:
        self.instance_id = instance_id
        self.role = role
        self.role_state = RoleState.SERVING
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.account = WorkerAccount(engine.busy, asyncio.get_running_loop().time())
        self.cached_blocks: dict[int, None] = {}  # chain hashes, each after its parent
        self.tier_blocks: set[int] = set()
        self.adapters: dict[str, Adapter] = {}  # those that requests may use, by key
        self.is_moving = False  # routers should move the open streams to other workers
        self.guard = guard
        self.connections: set[Session] = set()  # open, also those without a hello
        self.session_numbers = itertools.count(1)
        self._engine = engine
        self._routers = routers or Registrations(())
        self._tracing = tracing
        self._former_role = role
        self._unsettled: asyncio.TimerHandle | None = None
        self._unhealthy = ""  # what is wrong with the machine
        self._exported = 0  # streams that another worker took over with their KV
        self._sessions: dict[str, Session] = {}
        self._streams: dict[int, _Stream] = {}
        self._adapter_lock = asyncio.Lock()
        self._held: deque[int] = deque(maxlen=_MAX_HELD)  # ended prefills, by engine stream id
        self._is_draining = draining
        self._is_announcing = False
        self._is_closing = False
        self._drain_may_end = asyncio.Event()  # no stream is open, or the drain was taken back
        self._drain_may_end.set()

    async def start(self) -> EngineInfo:
        """Start the engine. Raises what that raises."""
        self._engine.on_cache(self._on_cache)
        return await self._engine.start(self._on_step, self._on_failure)

    def new_session(self) -> Session:
        """Return the protocol of a new connection, for `loop.create_server`."""
        return Session(self)

    # What is reported.

    @property
    def is_draining(self) -> bool:
        """True if routers should send no new requests."""
        return self._is_draining or self.role_state is not RoleState.SERVING

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def load(self) -> WorkerLoad | None:
        return self._engine.load()

    def ledger(self) -> KvLedger:
        return self._engine.ledger()

    def kv_state(self) -> KvState | None:
        return self._engine.kv_state()

    def state(self) -> w.RenewRequest:
        """Return what routers are told with each renewal of the lease."""
        load, kv = self.load(), self.kv_state()
        return w.RenewRequest(
            load=None if load is None else wire.load_to_pb(load),
            draining=self.is_draining,
            moving=self.is_moving,
            unhealthy=self._unhealthy,
            kv=None if kv is None else wire.kv_report_to_pb(kv.report()),
            adapters=map(wire.adapter_to_pb, self.adapters.values()),
        )

    def set_unhealthy(self, reason: str) -> None:
        """Tell routers what is wrong with this machine; "" if it is well again."""
        self._unhealthy = reason
        self._routers.renew()

    # Sessions.

    def attach(self, session: Session) -> None:
        """Accept a session. An older one of the same router is closed. Raises Unavailable."""
        if self._is_closing:
            raise Unavailable("this worker is closing")
        older = self._sessions.get(session.router_id)
        if older is not None:
            older.close(Unavailable(f"router {session.router_id} opened another session"))
            self.detach(older)
        self._sessions[session.router_id] = session
        session.send(self._frame(session))

    def detach(self, session: Session) -> None:
        """Cancel all requests of a session that has ended. Idempotent."""
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
            self._routers.renew()  # a restarted router does not know this worker yet
        for stream_id in list(session.streams):
            self._cancel(stream_id, "router_lost")

    def watch_cache(self, session: Session) -> None:
        """Send a snapshot of the prefix cache, in parts, and its changes from now on."""
        session.watches_cache = True
        blocks, in_tiers = list(self.cached_blocks), list(self.tier_blocks)
        count = max(1, len(blocks), len(in_tiers))
        for start in range(0, count, _SNAPSHOT_PART):
            end = start + _SNAPSHOT_PART
            update = w.CacheUpdate(
                reset=not start,
                more=end < count,
                stored=pack(blocks[start:end]),
                tier_stored=pack(in_tiers[start:end]),
            )
            session.send(w.StepFrame(cache=update))

    def _on_cache(self, change: CacheChange) -> None:
        for block in change.removed:
            self.cached_blocks.pop(block, None)
        self.cached_blocks.update(dict.fromkeys(change.stored))
        self.tier_blocks.difference_update(change.tier_removed)
        self.tier_blocks.update(change.tier_stored)
        watching = [session for session in self._sessions.values() if session.watches_cache]
        if watching:
            update = w.CacheUpdate(
                removed=pack(change.removed),
                stored=pack(change.stored),
                tier_removed=pack(change.tier_removed),
                tier_stored=pack(change.tier_stored),
            )
            for session in watching:
                session.send(w.StepFrame(cache=update))

    # Requests.

    def submit(self, session: Session, submit: w.Submit) -> None:
        """Give a request to the engine, or end it with the error that refuses it."""
        stream_id = session.first_stream_id + submit.stream_id
        try:
            if stream_id in self._streams:
                raise InvalidRequest("stream_id is in use in this session", field="stream_id")
            self._check_accepts(submit)
            work = _work(submit, stream_id, self.role)
        except PdserveError as error:
            self._refuse(session, submit.stream_id, error)
            return
        span = None
        if self._tracing is not None and submit.traceparent:  # else its router does not trace it
            attributes: dict[str, str | int] = {
                "pdserve.request_id": work.request_id,
                "pdserve.prompt_tokens": len(work.prompt_token_ids),
                "pdserve.resumed_tokens": len(work.resume_token_ids),
            }
            name = f"{submit.WhichOneof('phase')}_stream"
            span = self._tracing.begin(name, submit.traceparent, attributes)
        is_prefill = isinstance(work.phase, PrefillPhase)
        stream = _Stream(session, submit.stream_id, is_prefill, submit.probe, span, work.adapter)
        self._streams[stream_id] = stream
        session.streams.add(stream_id)
        self._engine.busy.open(stream_id)
        try:
            self._engine.submit(work)
        except Exception:
            logger.exception("request %s could not be submitted", work.request_id)
            failure = InternalError("the worker failed on this request")
            self._refuse(session, submit.stream_id, failure)

    def _check_accepts(self, submit: w.Submit) -> None:
        is_probe = self.role_state is RoleState.PROVING and submit.probe
        # What routers send before they know of a drain was placed in good faith.
        is_open = self._is_announcing or not self.is_draining
        if self._is_closing or not (is_open or (is_probe and not self._is_draining)):
            raise Unavailable("this worker is draining")
        if submit.adapter and submit.adapter not in self.adapters:
            raise Unavailable(f"adapter {submit.adapter} is not loaded on this worker")

    def _refuse(self, session: Session, router_stream_id: int, error: PdserveError) -> None:
        stream_id = session.first_stream_id + router_stream_id
        if stream_id in self._streams:
            self._cancel(stream_id, error.code)
        session.send(_error_frame(router_stream_id, error))

    def _cancel(self, stream_id: int, reason: str) -> None:
        self._forget(stream_id)
        self._engine.cancel(stream_id)
        self.account.waste(stream_id, reason)

    def cancel(self, session: Session, cancel: w.Cancel) -> None:
        """Stop a request without a last delta, or release what an ended prefill holds. Unknown
        streams are ignored. Raises InvalidRequest."""
        reason = cancel.reason or Cancelled.code
        if not wire.is_name(reason):
            raise InvalidRequest(f"{reason[:64]!r} is no reason", field="cancel.reason")
        self._cancel(session.first_stream_id + cancel.stream_id, reason)

    def export(self, session: Session, export: w.Export) -> None:
        """End a request whose KV another worker will fetch. Unknown streams are ignored."""
        self._engine.export(session.first_stream_id + export.stream_id, export.transfer_id)

    def _on_step(self, deltas: Sequence[StreamDelta]) -> None:
        """Send each router one frame with what this step made for its requests."""
        frames: dict[Session, w.StepFrame] = {}
        plain: dict[Session, list[tuple[int, int, str]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.stream_id)
            if stream is None:
                continue
            session = stream.session
            frame = frames.get(session)
            if frame is None:
                frame = frames[session] = self._frame(session)
            if wire.is_plain(delta):
                row = (stream.router_stream_id, delta.token_ids[0], delta.text)
                plain.setdefault(session, []).append(row)
                continue
            if delta.finish_reason is not None:
                self._settle(stream, delta)
            frame.deltas.append(wire.delta_to_pb(replace(delta, stream_id=stream.router_stream_id)))
            if delta.finish_reason is not None:
                if stream.is_prefill or delta.exported_tokens:
                    self._held.append(delta.stream_id)
                self._exported += delta.exported_tokens > 0
                self._forget(delta.stream_id, delta)
        for session, frame in frames.items():
            if session in plain:
                frame.tokens.CopyFrom(wire.plain_to_pb(plain[session]))
            session.send(frame)

    def _settle(self, stream: _Stream, last: StreamDelta) -> None:
        """Put the request's share of the engine's time into its report, or to waste if no answer
        has its work."""
        if stream.is_probe or last.error is not None or last.report is None:
            reason = Cancelled.code if last.error is None else last.error.code
            self.account.waste(last.stream_id, _PROBE if stream.is_probe else reason)
            return
        share, last.report.energy_j = self.account.settle(last.stream_id)
        last.report.prefill_busy_s, last.report.decode_busy_s = share.prefill_s, share.decode_s

    def _frame(self, session: Session) -> w.StepFrame:
        """Return a frame with the load, and with the costs of steps if they are due."""
        session.reported_load = load = self.load()
        frame = w.StepFrame(load=None if load is None else wire.load_to_pb(load))
        now = asyncio.get_running_loop().time()
        if now - session.steps_reported_at >= STEPS_PERIOD_S:
            recorder = self._engine.busy.recorder
            moments = recorder.moments(now)
            if moments.prefill.steps or moments.decode.steps:
                before, session.steps_reported_at = session.steps_reported_at, now
                frame.steps.CopyFrom(wire.moments_to_pb(moments))
                new = [step for step in recorder.recent() if step.ended_at > before]
                frame.recent_steps.CopyFrom(wire.recent_steps_to_pb(new, now))
        return frame

    def beat(self, session: Session) -> None:
        """Send a sign of life if the router waits for requests, or if the load has changed: what a
        router cancelled leaves the engine some time later."""
        if session.streams or self.load() != session.reported_load:
            session.send(self._frame(session))

    def _on_failure(self, error: BaseException) -> None:
        self._is_draining = True
        failure = WorkerFailed("the worker's engine died")
        for stream_id, stream in list(self._streams.items()):
            self._forget(stream_id, ended_by(stream_id, failure))
            self.account.waste(stream_id, failure.code)
            stream.session.send(_error_frame(stream.router_stream_id, failure))
        if not self.failed.done():
            self.failed.set_result(error)

    def _forget(self, stream_id: int, last: StreamDelta | None = None) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        if stream.span is not None:
            _end_span(stream.span, last)
        stream.session.streams.discard(stream_id)
        if not self._streams:
            self._drain_may_end.set()

    # LoRA adapters.

    async def load_adapter(self, name: str, path: str, model: str, digest: str = "") -> Adapter:
        """Load the adapter in the directory `path`, and report it to routers. Raises InvalidRequest
        if it cannot be loaded, or has another digest."""
        async with self._adapter_lock:
            adapter = await asyncio.to_thread(read_adapter, name, path, model)
            if digest and adapter.digest != digest:
                text = f"the files in {adapter.path} are not those of other workers ({digest})"
                raise InvalidRequest(text, field="lora_path")
            if adapter.key not in self.adapters:
                await self._engine.load_adapter(adapter)
                if await asyncio.to_thread(read_adapter, name, path, model) != adapter:
                    await self._engine.unload_adapter(adapter.key)
                    text = f"the files in {adapter.path} changed while they were loaded"
                    raise InvalidRequest(text, field="lora_path")
                self.adapters[adapter.key] = adapter
                self._routers.renew()
            return adapter

    async def unload_adapter(self, key: str) -> None:
        """Report an adapter no more, and unload it when no request uses it. Unknown ones are
        ignored."""
        self.adapters.pop(key, None)
        self._routers.renew()
        while self._uses(key):  # noqa: ASYNC110 - streams end in many places
            await asyncio.sleep(_LEDGER_POLL_S)
        async with self._adapter_lock:
            if key not in self.adapters:  # nobody has loaded it again
                await self._engine.unload_adapter(key)

    def _uses(self, key: str) -> bool:
        return any(stream.adapter == key for stream in self._streams.values())

    # Drain and role.

    async def drain(self, timeout_s: float) -> tuple[bool, int]:
        """Take no new requests and empty the worker: see `_empty`. Ends when `end_drain` is called
        meanwhile."""
        was_open, self._is_draining = not self.is_draining, True
        return await self._empty(timeout_s, "this worker is draining", announce=was_open)

    async def end_drain(self) -> None:
        """Take new requests again. Return when the routers know it, so that another worker can be
        drained next. Raises Unavailable if the engine died or the worker closes."""
        if self._is_closing or self.failed.done():
            raise Unavailable("this worker is stopping")
        self._is_draining = False
        self._drain_may_end.set()
        await self._routers.renewed()

    async def change_role(self, role: Role, drain_timeout_s: float) -> int:
        """Empty the worker, then register in the other role, in state PROVING. Return how many
        streams were moved.

        Raises InvalidRequest for a role that the worker cannot take, and Unavailable while a change
        is under way or if blocks stay pinned; the role is unchanged then.
        """
        if self.role_state is not RoleState.SERVING:
            raise Unavailable(
                f"this worker is {self.role_state} a change of its role", retry_after_s=1.0
            )
        if role is self.role or {role, self.role} != {Role.PREFILL, Role.DECODE}:
            raise InvalidRequest(
                f"a worker cannot change from {self.role} to {role}, only between prefill and "
                f"decode",
                field="role",
            )
        self.role_state = RoleState.DRAINING
        try:
            is_empty, moved = await self._empty(
                drain_timeout_s, "this worker changes its role", announce=not self._is_draining
            )
            if not is_empty:
                raise Unavailable(f"blocks are still pinned: {self.ledger()}")
        except BaseException:
            self.role_state = RoleState.SERVING
            self._routers.renew()
            raise
        self._former_role, self.role_state = self.role, RoleState.PROVING
        self._take_role(role)
        loop = asyncio.get_running_loop()
        self._unsettled = loop.call_later(SETTLE_S, lambda: self.settle_role(keep=False))
        return moved

    def settle_role(self, *, keep: bool) -> bool:
        """End PROVING, in the new role or in the former one. Return False if nothing is to be
        settled."""
        if self.role_state is not RoleState.PROVING:
            return False
        if self._unsettled is not None:
            self._unsettled.cancel()
        self.role_state = RoleState.SERVING
        if keep:
            self._routers.renew()
        else:
            self._take_role(self._former_role)
        logger.info("this worker is a %s worker now", self.role)
        return True

    def _take_role(self, role: Role) -> None:
        self.role = role
        self._routers.change_role(role)

    async def _empty(self, timeout_s: float, reason: str, *, announce: bool) -> tuple[bool, int]:
        """Empty the worker. Return whether no stream is open and no block is pinned, and how many
        streams other workers took over.

        First routers learn that the worker drains (if `announce`); meanwhile what they send is
        taken. Then streams may end by themselves for `timeout_s`. Then routers move those that are
        left. What they did not move ends with an error, on which they go on elsewhere.
        """
        before, now = self._exported, asyncio.get_running_loop().time
        until = now() + timeout_s
        if announce:
            self._is_announcing = True
            try:
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._routers.renewed()
            except TimeoutError:
                pass  # a router that hangs finds this worker draining later
            finally:
                self._is_announcing = False
        if await self._is_empty_by(until):
            return True, self._exported - before
        moved = self._exported - before + self.open_streams
        until = now() + MOVE_S
        self.is_moving = True
        try:
            while self.is_draining and now() < until:
                self._routers.renew()
                if await self._is_empty_by(now() + _MOVE_PERIOD_S):
                    return True, moved
        finally:
            self.is_moving = False
        if not self.is_draining:
            return False, 0
        for stream in list(self._streams.values()):
            self._refuse(stream.session, stream.router_stream_id, Unavailable(reason))
        while self._held:
            self._engine.cancel(self._held.popleft())
        return await self._is_empty_by(now() + UNPIN_S), moved

    async def _is_empty_by(self, until: float) -> bool:
        """Wait until no stream is open and no block is pinned, and return whether this is so. A
        drain that is taken back is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self.is_draining and (self._streams or not self.ledger().is_empty):
                    if self._streams:
                        self._drain_may_end.clear()
                    await self._drain_may_end.wait()
                    await asyncio.sleep(_LEDGER_POLL_S)
        return self.is_draining and not self._streams and self.ledger().is_empty

    def close_sessions(self) -> None:
        """Close every session once what is queued for it is sent, and accept no new one."""
        self._is_draining = self._is_closing = True
        if self._unsettled is not None:
            self._unsettled.cancel()
        for session in list(self.connections):
            session.close()

    async def close(self) -> None:
        """Cancel what is left and end the engine. Idempotent."""
        self.close_sessions()
        closed = [session.closed for session in self.connections]
        for session in list(self.connections):
            self.detach(session)
        await self._engine.close()
        if closed:
            await asyncio.wait(closed)  # what was queued has been sent, or LINGER_S have passed


class Session(asyncio.Protocol):
    """One connection of a router.

    State: its open streams, and what the router was last told of load and step costs. The engine's
    stream ids are `first_stream_id` plus the router's. A router that does not read is dropped when
    MAX_UNSENT_BYTES wait for it.
    """

    def __init__(self, service: WorkerService) -> None:
        self.router_id = ""
        self.first_stream_id = next(service.session_numbers) << 64
        self.streams: set[int] = set()  # by the engine's ids
        self.reported_load: WorkerLoad | None = None
        self.steps_reported_at = -math.inf
        self.watches_cache = False
        self._service = service
        self._parser = framing.FrameParser(w.Command, limit=_HELLO_BYTES)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle  # for the hello, beats, or the end
        self._sent_at = 0.0
        self._transport: asyncio.Transport
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        detect_dead_peer(transport.get_extra_info("socket"), framing.PEER_TIMEOUT_S)
        late = InvalidRequest("no hello came", field="hello")
        self._timer = self._loop.call_later(HELLO_S, self.close, late)
        connections = self._service.connections
        connections.add(self)
        if sum(not x.router_id for x in connections) > _MAX_STRANGERS:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for command in self._parser.feed(data):
                if self._transport.is_closing():
                    return
                self._take(command)
        except PdserveError as error:
            self.close(error)
        except Exception:
            logger.exception("the session of router %s failed", self.router_id or "?")
            self.close(InternalError("the worker could not handle a command"))

    def _take(self, command: w.Command) -> None:
        kind = command.WhichOneof("command")
        if not self.router_id and kind != "hello":
            raise InvalidRequest("the first command must be hello", field="command")
        match kind:
            case "hello" if not self.router_id:
                self._greet(command.hello)
            case "submit":
                self._service.submit(self, command.submit)
            case "cancel":
                self._service.cancel(self, command.cancel)
            case "export":
                self._service.export(self, command.export)
            case "watch_cache":
                self._service.watch_cache(self)
            case _:
                raise InvalidRequest(f"unexpected command {kind}", field="command")

    def _greet(self, hello: w.Hello) -> None:
        if self._service.guard is not None:
            self._service.guard.check_session(self._transport, hello.token)
        if not hello.router_id:
            raise InvalidRequest("hello.router_id is missing", field="hello.router_id")
        if hello.instance_id != self._service.instance_id:
            raise InvalidRequest(
                f"this worker's instance is {self._service.instance_id}", field="hello.instance_id"
            )
        self.router_id = hello.router_id
        self._parser.limit = framing.MAX_FRAME_BYTES
        self._beat_in(BEAT_S)
        self._service.attach(self)

    def send(self, frame: w.StepFrame) -> None:
        """Send a frame. Nothing happens once the connection closes."""
        if self._transport.is_closing():
            return
        self._sent_at = self._loop.time()
        self._transport.write(framing.pack(frame))
        if self._transport.get_write_buffer_size() > framing.MAX_UNSENT_BYTES:
            logger.warning("router %s does not read its frames: dropped", self.router_id)
            self._transport.abort()

    def close(self, error: PdserveError | None = None) -> None:
        """Send what is queued and the error, then close. Later calls do nothing."""
        if self._transport.is_closing():
            return
        if error is not None:
            self.send(w.StepFrame(closed=wire.error_to_pb(error)))
        self._transport.close()
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._service.connections.discard(self)
        self.closed.set_result(None)
        if self.router_id:
            self._service.detach(self)

    def _beat_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._beat)

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._sent_at
        if silent_s >= BEAT_S:
            self._service.beat(self)
            silent_s = 0.0
        self._beat_in(BEAT_S - silent_s)


def _error_frame(router_stream_id: int, error: PdserveError) -> w.StepFrame:
    return w.StepFrame(deltas=[wire.delta_to_pb(ended_by(router_stream_id, error))])


def _work(submit: w.Submit, stream_id: int, role: Role) -> Work:
    """Return the work of `submit` for the engine. Raises InvalidRequest naming the field."""
    if not submit.sampling.HasField("max_tokens"):
        raise InvalidRequest("max_tokens is missing", field="max_tokens")
    phase, name = _phase(submit), submit.WhichOneof("phase")
    # Every role that generates takes aggregated requests: routers fall back to them.
    if name != role and (name != Role.AGGREGATED or role is Role.POOLING):
        raise InvalidRequest(f"a {role} worker takes no {name} requests", field="phase")
    max_tokens = submit.sampling.max_tokens
    return Work(
        stream_id=stream_id,
        request_id=_present("request_id", submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=wire.sampling_from_pb(submit.sampling, default_max_tokens=max_tokens),
        phase=phase,
        resume_token_ids=tuple(submit.resume_token_ids),
        adapter=submit.adapter,
        cache_salt=submit.cache_salt,
        reasoning_gate=_reasoning_gate(submit),
    )


def _reasoning_gate(submit: w.Submit) -> ReasoningGate | None:
    if not submit.HasField("reasoning_gate"):
        return None
    gate = submit.reasoning_gate
    return ReasoningGate(gate.parser, gate.kwargs_json)


def _phase(submit: w.Submit) -> Phase:
    match submit.WhichOneof("phase"):
        case "prefill":
            return PrefillPhase(_present("prefill.transfer_id", submit.prefill.transfer_id))
        case "decode":
            decode = submit.decode
            return DecodePhase(
                _present("decode.transfer_id", decode.transfer_id),
                _present("decode.producer_addresses", tuple(decode.producer_addresses)),
                _present("decode.producer_instance_id", decode.producer_instance_id),
                kv_handle=decode.kv_handle,
                live=decode.live,
            )
        case "aggregated":
            return AggregatedPhase()
        case "pooling":
            return PoolingPhase(submit.pooling.second_text_at)
    raise InvalidRequest("phase is missing", field="phase")


def _present(name: str, value: T) -> T:
    if not value:
        raise InvalidRequest(f"{name} is missing", field=name)
    return value


def _end_span(span: Span, last: StreamDelta | None) -> None:
    """End a span with a child for each phase. Without the engine's last delta the stream was
    cancelled. Reports have durations only: phases follow one another from the start, and decoding
    ends with the span."""
    report = None if last is None else last.report
    if last is None or report is None:
        span.end(Cancelled("the router cancelled it") if last is None else last.error)
        return
    at_s = 0.0
    transfer_s = 0.0 if report.transfer is None else report.transfer.transfer_s
    phases = (("queue", report.queue_s), ("prefill", report.prefill_s), ("kv_transfer", transfer_s))
    for name, seconds in phases:
        if seconds:
            span.phase(name, at_s, seconds)
            at_s += seconds
    if report.decode_s:
        span.phase("decode", max(at_s, span.elapsed_s() - report.decode_s), report.decode_s)
    span.end(last.error)
