"""The link of this router to one worker: commands go out, step frames come in.

The worker sends one frame per engine step for all requests of this router. Each delta is passed to
the receiver of its stream directly, without a task switch. When the connection breaks, each stream
is reported with `on_lost`, and a connection is opened again with growing pauses until `close`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from msgspec import structs

from pdserve import wire
from pdserve.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    PermissionDenied,
    WorkerFailed,
    from_info,
)
from pdserve.net import framing, rpc
from pdserve.net.backoff import backoff
from pdserve.net.rpc import PLAIN
from pdserve.net.sockets import detect_dead_peer
from pdserve.security.roles import Party, check_peer
from pdserve.v1 import worker_pb2 as w
from pdserve.wire import moments_from_pb
from router.fleet.health import StallDetector

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from pdserve.net.rpc import Dialer
    from pdserve.observe.metrics import Histogram
    from pdserve.types import StreamDelta, WorkerInfo
    from router.fleet.member import Member
    from router.fleet.prefix_watch import PrefixWatcher

    Connect = Callable[[WorkerInfo, Callable[[], asyncio.Protocol]], Awaitable[object]]
    Links = Mapping[Member, "WorkerLink"]  # of all workers that are not lost
    Renewals = asyncio.Queue[tuple[Member, w.RenewRequest]]

logger = logging.getLogger(__name__)

PONG_TIMEOUT_S = 1.0
# A command with images waits until at most this much of earlier commands is unread.
_DRAINED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """`attach_timeout_s`: from the connect to the worker's first frame. `reconnect_min_s`,
    `reconnect_max_s`: pauses before an attempt to reconnect. `max_unsent_bytes`: a worker that
    leaves more unread gets no more commands."""

    attach_timeout_s: float = 5.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0
    max_unsent_bytes: int = framing.MAX_UNSENT_BYTES


DEFAULT_LIMITS = LinkLimits()


S_contra = TypeVar("S_contra", contravariant=True)


class StreamReceiver(Protocol[S_contra]):
    """Receives the deltas of streams. Called from the reader, so it must not block. `stream`: the
    argument of `submit`; the link keeps it until its last delta, loss or cancel."""

    # The last delta has a finish reason.
    def on_delta(self, stream: S_contra, delta: StreamDelta) -> None: ...

    # A delta of one plain token.
    def on_token(self, stream: S_contra, token_id: int, text: str) -> None: ...

    # The stream ended without a last delta; with InternalError if one of the calls above raised.
    def on_lost(self, stream: S_contra, error: PdserveError) -> None: ...


def connect_over_tcp(dialer: rpc.Dialer) -> Connect:
    """Return a function that connects a protocol to a worker's session address, with TLS if
    `dialer` has a context."""

    async def connect(info: WorkerInfo, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        host, _, port = info.session_address.rpartition(":")
        host = host.strip("[]")
        server_name = None if dialer.context is None else dialer.peer_name or host
        transport, _ = await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, host, int(port), ssl=dialer.context, server_hostname=server_name
        )
        try:
            if dialer.checks_roles:
                check_peer(transport, Party.WORKER)
        except PermissionDenied:
            transport.abort()
            raise
        # Created only after the check, because the protocol sends its hello, with the token, at
        # once.
        protocol = make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    return connect


def _hello(router_id: str, instance_id: str, dialer: Dialer) -> w.Hello:
    token = "\n".join(dialer.tokens)  # read again for each connection: they may be replaced
    return w.Hello(router_id=router_id, instance_id=instance_id, token=token)


class WorkerLink:
    """Link to one worker: a TCP connection, opened again when it breaks. Writes the worker's
    reports to `member`. State: the open requests by stream id. Owns one task, which `close`
    ends."""

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        connect: Connect,
        changed: Callable[[], None],
        renewals: Renewals,
        dialer: Dialer = PLAIN,
        gaps: Histogram | None = None,
        watches: PrefixWatcher | None = None,
        limits: LinkLimits = DEFAULT_LIMITS,
    ) -> None:
        """`changed` is called when the link is up or down, and when the worker has more room.
        `renewals` gets the worker's renewals of its lease, which `acknowledge` answers. `gaps`
        observes, for each token, the time since the previous frame with tokens. `watches` indexes
        the worker's prefix cache."""
        self._member = member
        self._changed = changed
        self._watches = watches
        self._gaps = _TokenGaps(gaps)
        self._limits = limits
        self._hello = partial(_hello, router_id, member.info.instance_id, dialer)
        self._connect = connect
        self._renewals = renewals
        self._streams: dict[int, tuple[StreamReceiver[Any], Any]] = {}
        self._last_stream_id = 0
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None  # None before `start` and after `close`
        self.is_refused = False  # the worker's port refuses connections, so its process has ended
        self._frames = 0  # received over all connections
        self._stalls = StallDetector()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def stall(self, now: float, stall_s: float) -> str:
        """Return why the worker hangs, or "". See `StallDetector.check`."""
        return self._stalls.check(
            now,
            frames=self._frames,
            streams=self.open_streams,
            load=self._member.reported.load,
            stall_s=stall_s,
        )

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._run(), name=f"worker-{self._member.worker_id}")

    def submit(
        self,
        command: w.Command,
        receiver: StreamReceiver[S_contra],
        stream: S_contra,
        prompt: bytes = b"",
    ) -> int:
        """Send a submit command under a new stream id and return the id. `receiver` gets the deltas
        of `stream`. `prompt`: result of `wire.set_prompt`.

        Raises WorkerFailed if the connection is down, Overloaded if the worker does not read.
        """
        # Never reused, so that late deltas of a cancelled stream reach no other request.
        self._last_stream_id += 1
        command.submit.stream_id = self._last_stream_id
        self._send(command, prompt)
        self._streams[self._last_stream_id] = receiver, stream
        return self._last_stream_id

    async def drained(self) -> None:
        """Wait until the worker has read nearly all commands, or the connection is down. Callers
        take turns, and may each send one large command when their turn returns."""
        if self._connection is not None:
            await self._connection.drained()

    def export(self, stream_id: int, transfer_id: str) -> None:
        """Send the worker a command to end a request and keep its KV for the consumer that presents
        `transfer_id`.

        Unknown streams are ignored. Raises the errors of `submit`.
        """
        if stream_id in self._streams:
            export = w.Export(stream_id=stream_id, transfer_id=transfer_id)
            self._send(w.Command(export=export))

    async def answers_ping(self) -> bool:
        """Return True if the worker's process answers within PONG_TIMEOUT_S, and so is alive and
        reads commands."""
        if self._connection is None:
            return False
        with self._connection.awaiting_pong() as (number, pong):
            try:
                self._send(w.Command(ping=number))
                async with asyncio.timeout(PONG_TIMEOUT_S):
                    return await pong
            except (PdserveError, TimeoutError):
                return False

    def acknowledge(self, renewed: w.RenewResponse) -> None:
        """Answer a renewal of the lease. A worker that cannot be reached gets no answer."""
        with suppress(PdserveError):
            self._send(w.Command(renewed=renewed))

    def cancel(self, stream_id: int, reason: str = "", *, ended: bool = False) -> None:
        """Stop a request. Its receiver gets no more calls. `reason` says why its work is wasted.

        Unknown streams are ignored. `ended`: the last delta has arrived, but the worker still holds
        blocks for the request; release them.
        """
        known = self._streams.pop(stream_id, None) is not None
        if not (known or ended) or self._connection is None:
            return
        try:
            self._send(w.Command(cancel=w.Cancel(stream_id=stream_id, reason=reason)))
        except Overloaded as error:
            # A cancel must not be lost. Drop the connection, because the worker then cancels all
            # its requests.
            self.drop(WorkerFailed(error.message))

    def drop(self, error: WorkerFailed) -> None:
        """Fail all open requests with `error` now and reconnect. The worker cancels them."""
        connection = self._connection
        self._detach(error)
        if connection is not None:
            connection.abort()

    def close(self, reason: str) -> asyncio.Task[None] | None:
        """Fail all open requests with `reason` and stay closed. Return the task to await."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._detach(WorkerFailed(reason))
        return task

    def _send(self, command: w.Command, prompt: bytes = b"") -> None:
        if self._connection is None:
            raise WorkerFailed(f"worker {self._member.worker_id} is not attached")
        # One command with images may be larger than the limit.
        limit = self._limits.max_unsent_bytes + self._connection.largest_sent
        if self._connection.unsent_bytes > limit:
            raise Overloaded(f"worker {self._member.worker_id} does not read its commands")
        self._connection.send(command, prompt)

    def _attach(self) -> None:
        # A lost worker stays lost; its connection is about to be closed.
        if self._member.lost:
            return
        self._member.attached = True
        logger.info("%s worker %s is ready", self._member.info.role, self._member.worker_id)
        if self._watches is not None:
            self._send(w.Command(watch_cache=w.WatchCache()))
        self._changed()

    def _detach(self, error: WorkerFailed) -> None:
        if (connection := self._connection) is None:
            return
        self._connection = None
        member = self._member
        member.attached = False
        # The state of the engine is unknown now.
        member.reported = structs.replace(member.reported, load=None, kv=None, foreign_blocks=0)
        member.roomier.add(member)
        if self._watches is not None:
            self._watches.forget(member)
        self._changed()
        connection.fail_pings()
        streams, self._streams = self._streams, {}
        for receiver, stream in streams.values():
            self._lose(receiver, stream, error)

    def _lose(self, receiver: StreamReceiver[Any], stream: object, error: PdserveError) -> None:
        try:
            receiver.on_lost(stream, error)
        except Exception:
            # The worker's other streams must be notified too.
            logger.exception("a stream of worker %s was lost", self._member.worker_id)

    def _deliver(
        self, stream_id: int, receiver: StreamReceiver[Any], stream: object, delta: StreamDelta
    ) -> None:
        try:
            receiver.on_delta(stream, delta)
        except Exception as error:  # noqa: BLE001 - _fail_stream logs it
            self._fail_stream(stream_id, receiver, stream, error)

    def _fail_stream(
        self, stream_id: int, receiver: StreamReceiver[Any], stream: object, cause: Exception
    ) -> None:
        """End a stream whose receiver raised. The worker is not at fault, so its other streams
        continue."""
        text = "a delta of stream %d of worker %s could not be handled"
        logger.error(text, stream_id, self._member.worker_id, exc_info=cause)
        self.cancel(stream_id, InternalError.code)
        error = InternalError("the router failed to pass on the answer; see its log")
        self._lose(receiver, stream, error)

    async def _run(self) -> None:
        name, pauses = f"worker {self._member.worker_id}", self._pauses()
        while True:
            connection = _Connection(self._hello(), self._on_frame)
            try:
                async with asyncio.timeout(self._limits.attach_timeout_s):
                    await self._connect(self._member.info, lambda connection=connection: connection)  # type: ignore[misc]
                    await connection.welcomed
                await connection.ended
                error = f"{name} closed the connection"
            except TimeoutError:
                error = f"{name} did not answer in {self._limits.attach_timeout_s:g} s"
            except OSError as cause:
                self.is_refused = isinstance(cause, ConnectionRefusedError)
                error = f"{name} cannot be reached: {cause}"
            except PdserveError as cause:
                error = f"{name} closed the connection: {cause.message}"
            except Exception:
                error = f"{name} sent a frame that could not be handled"
                logger.exception("%s", error)
            finally:
                connection.abort()
            logger.log(logging.WARNING if connection.is_welcome else logging.DEBUG, "%s", error)
            self._detach(WorkerFailed(error))
            pauses = self._pauses() if connection.is_welcome else pauses
            await asyncio.sleep(next(pauses))

    def _pauses(self) -> Iterator[float]:
        limits = self._limits
        return backoff(limits.reconnect_min_s, limits.reconnect_max_s, jitter=True)

    def _on_frame(self, connection: _Connection, frame: w.StepFrame) -> None:
        if self._task is None:
            return
        if not connection.is_welcome:  # the first frame means that the worker accepts the hello
            connection.welcome()
            self._connection, self.is_refused = connection, False
            self._attach()
        self._frames += 1
        member = self._member
        if frame.HasField("load") and member.report_load(wire.load_from_pb(frame.load)):
            self._changed()
        if frame.HasField("steps"):
            # Copied, because a submessage keeps its whole frame in memory.
            recent = w.RecentSteps()
            recent.CopyFrom(frame.recent_steps)
            member.reported = structs.replace(
                member.reported,
                steps=moments_from_pb(frame.steps),
                recent_steps=recent,
                recent_steps_at=connection.loop.time(),
            )
        if frame.HasField("cache") and self._watches is not None:
            self._watches.apply(member, frame.cache)
        if frame.pong:
            connection.pong(frame.pong)
        if frame.HasField("renewal"):
            self._on_renewal(frame.renewal)
        if frame.HasField("tokens"):
            self._on_tokens(frame.tokens, connection.loop.time())
        if frame.deltas:
            self._on_deltas(frame.deltas)
        if not self._streams:
            self._gaps.reset()

    def _on_deltas(self, deltas: Sequence[w.StreamDelta]) -> None:
        streams = self._streams
        for message in deltas:
            known = streams.get(message.stream_id)
            if known is None:
                continue
            receiver, stream = known
            delta = wire.delta_from_pb(message)
            if delta.finish_reason is not None:
                del streams[message.stream_id]
            self._deliver(message.stream_id, receiver, stream, delta)

    def _on_renewal(self, renewal: w.RenewRequest) -> None:
        info = self._member.info
        if (renewal.worker_id, renewal.instance_id) != (info.worker_id, info.instance_id):
            raise InvalidRequest("it is of another worker", field="renewal")
        self._renewals.put_nowait((self._member, renewal))

    def _on_tokens(self, tokens: w.PlainTokens, now: float) -> None:
        # Read each list once: every access to a field of a message creates an object.
        stream_ids, token_ids, texts = tokens.stream_ids, tokens.token_ids, tokens.texts
        if not len(stream_ids) == len(token_ids) == len(texts):
            raise InvalidRequest("its lists differ in length", field="tokens")
        self._gaps.observe(now, len(stream_ids))
        streams = self._streams
        for stream_id, token_id, text in zip(stream_ids, token_ids, texts, strict=True):
            known = streams.get(stream_id)
            if known is not None:
                receiver, stream = known
                try:
                    receiver.on_token(stream, token_id, text)
                except Exception as error:  # noqa: BLE001 - _fail_stream logs it
                    self._fail_stream(stream_id, receiver, stream, error)


class _TokenGaps:
    """Observes, for each token, the time since the previous frame with tokens."""

    def __init__(self, histogram: Histogram | None) -> None:
        self._histogram = histogram
        self._tokens_at: float | None = None  # arrival of the last frame with tokens

    def observe(self, now: float, tokens: int) -> None:
        if self._histogram is not None and self._tokens_at is not None:
            self._histogram.observe(now - self._tokens_at, tokens)
        self._tokens_at = now

    def reset(self) -> None:
        """Forget the last frame, because the time until the next request is no gap."""
        self._tokens_at = None


class _Connection(asyncio.Protocol):
    """One TCP connection. `welcomed` completes when the worker has accepted the hello, `ended` when
    the connection is closed. Both get the error, if any."""

    def __init__(
        self, hello: w.Hello, on_frame: Callable[[_Connection, w.StepFrame], None]
    ) -> None:
        self._hello = hello
        self._on_frame = on_frame
        self._parser = framing.FrameParser(w.StepFrame)
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self.largest_sent = 0  # bytes of the largest command with images
        self._writable = asyncio.Event()
        self._writable.set()
        self.drain_turn = asyncio.Lock()
        # Numbers are never reused, so that a late pong answers no other ping.
        self._ping_numbers = itertools.count(1)
        self._pings: dict[int, asyncio.Future[bool]] = {}
        self.is_welcome = False
        self.welcomed: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of commands that are not yet in the kernel's send buffer."""
        assert self._transport is not None
        return self._outgoing_bytes + self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        detect_dead_peer(transport.get_extra_info("socket"), framing.PEER_TIMEOUT_S)
        self._transport.set_write_buffer_limits(high=_DRAINED_BYTES)
        self._transport.write(framing.pack(w.Command(hello=self._hello)))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def welcome(self) -> None:
        self.is_welcome = True
        _settle(self.welcomed, None)

    def send(self, command: w.Command, prompt: bytes = b"") -> None:
        """Send a command, with the result of `wire.set_prompt` if it has a prompt. All commands of
        one event loop iteration are one write, because a write costs a system call."""
        self._outgoing.append(framing.pack(command, prompt))
        self._outgoing_bytes += (size := len(self._outgoing[-1]))
        if command.submit.media:
            self.largest_sent = max(self.largest_sent, size)
        if len(self._outgoing) == 1:
            self.loop.call_soon(self._flush)

    async def drained(self) -> None:
        """Wait until the peer has read nearly all commands, or the connection is closed."""
        async with self.drain_turn:
            self._flush()
            await self._writable.wait()

    @contextmanager
    def awaiting_pong(self) -> Iterator[tuple[int, asyncio.Future[bool]]]:
        """Yield the number of a new ping, and a future that is True once the worker answers it, and
        False if the link goes down first."""
        number = next(self._ping_numbers)
        pong = self._pings[number] = self.loop.create_future()
        try:
            yield number, pong
        finally:
            del self._pings[number]

    def pong(self, number: int) -> None:
        """Record that the worker answers the ping with this number."""
        if (pong := self._pings.get(number)) is not None and not pong.done():
            pong.set_result(True)

    def fail_pings(self) -> None:
        for pong in self._pings.values():
            if not pong.done():
                pong.set_result(False)

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
        self._outgoing_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for frame in self._parser.feed(data):
                if frame.HasField("closed"):
                    raise from_info(wire.error_from_pb(frame.closed))
                self._on_frame(self, frame)
                if self.ended.done():
                    return  # handling the frame dropped this connection
        except Exception as error:  # noqa: BLE001 - the connection's task logs it
            self.abort(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def abort(self, error: Exception | None = None) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._writable.set()
        _settle(self.welcomed, error or ConnectionError("it closed the connection"))
        _settle(self.ended, error)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # mark as retrieved: asyncio logs errors that are not awaited
