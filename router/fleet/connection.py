"""The connection of this router to one worker: commands go out, step frames come in.

The worker sends one frame an engine step for all requests of this router. Each delta goes to the
sink of its request at once, without a task. When the connection breaks, every sink is told, and the
connection is opened again, with growing pauses, until it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Protocol, cast

from pdserve import framing, rpc, wire
from pdserve.dead_peer import detect_dead_peer
from pdserve.errors import InvalidRequest, Overloaded, PdserveError, WorkerFailed, from_info
from pdserve.v1 import worker_pb2 as w
from pdserve.wire import moments_from_pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.metrics import Histogram
    from pdserve.types import StreamDelta, WorkerInfo, WorkerLoad
    from router.fleet.member import Member

    Connect = Callable[[WorkerInfo, Callable[[], asyncio.Protocol]], Awaitable[object]]

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 5.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0


class DeltaSink(Protocol):
    """Receives the deltas of one request. Called from the reader, so it must not block."""

    def on_delta(self, delta: StreamDelta) -> None: ...  # none follows one with a finish reason

    def on_token(self, token_id: int, text: str) -> None: ...  # a delta with nothing else

    def on_lost(self, error: PdserveError) -> None: ...  # the request ended without a last delta


class ConnectionObserver(Protocol):
    """Is told what happens to a connection. `detached` comes before the sinks hear of a break."""

    def attached(self, member: Member) -> None: ...
    def detached(self, member: Member) -> None: ...
    def reported(self, member: Member, load: WorkerLoad) -> None: ...
    def cache_changed(self, member: Member, update: w.CacheUpdate) -> None: ...


def connect_over_tcp(dialer: rpc.Dialer) -> Connect:
    """Return a function that connects a protocol to a worker's session address, with TLS if
    `dialer` has a context."""

    async def connect(info: WorkerInfo, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        host, _, port = info.session_address.rpartition(":")
        host = host.strip("[]")
        server_name = None if dialer.context is None else dialer.peer_name or host
        await asyncio.get_running_loop().create_connection(
            make_protocol, host, int(port), ssl=dialer.context, server_hostname=server_name
        )

    return connect


class WorkerConnection:
    """State: the open requests of one worker by stream id. Owns one task, ended by `close`."""

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        observer: ConnectionObserver,
        connect: Connect,
        token: str = "",
        gaps: Histogram | None = None,
    ) -> None:
        """`gaps` observes for each token the time since the last frame with tokens."""
        self._member = member
        self._gaps = gaps
        self._tokens_at: float | None = None  # of the last frame with tokens
        self._hello = w.Hello(router_id=router_id, instance_id=member.info.instance_id, token=token)
        self._observer = observer
        self._connect = connect
        self._sinks: dict[int, DeltaSink] = {}
        self._last_stream_id = 0
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.frames = 0  # received so far, over all sessions

    @property
    def open_streams(self) -> int:
        return len(self._sinks)

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._run(), name=f"worker-{self._member.worker_id}")

    def submit(self, command: w.Command, sink: DeltaSink) -> int:
        """Send a submit command under a new stream id and return the id.

        Raises WorkerFailed if the connection is down, Overloaded if the worker does not read.
        """
        self._last_stream_id += 1
        command.submit.stream_id = self._last_stream_id
        self._send(command)
        self._sinks[self._last_stream_id] = sink
        return self._last_stream_id

    def export(self, stream_id: int, transfer_id: str) -> None:
        """Ask the worker to end a request and keep its KV for whoever presents `transfer_id`.

        Unknown streams are ignored. Raises as `submit`.
        """
        if stream_id in self._sinks:
            export = w.Export(stream_id=stream_id, transfer_id=transfer_id)
            self._send(w.Command(export=export))

    def watch_cache(self) -> None:
        """Ask for a snapshot of the worker's prefix cache and its changes. Raises as `submit`."""
        self._send(w.Command(watch_cache=w.WatchCache()))

    def cancel(self, stream_id: int, reason: str = "", *, ended: bool = False) -> None:
        """Stop a request, whose work no answer needs for this reason; its sink hears nothing more.
        Unknown streams are ignored.

        `ended` is for a prefill whose last delta has come, to release the blocks that it holds.
        """
        known = self._sinks.pop(stream_id, None) is not None
        if not (known or ended) or self._session is None:
            return
        try:
            self._send(w.Command(cancel=w.Cancel(stream_id=stream_id, reason=reason)))
        except Overloaded as error:
            # A cancel must not be lost. The worker cancels every request of a session that ends.
            self.drop(WorkerFailed(error.message))

    def drop(self, error: WorkerFailed) -> None:
        """Fail all open requests with `error` now and connect again. The worker cancels them."""
        session = self._session
        self._detach(error)
        if session is not None:
            session.abort()

    def close(self, reason: str) -> asyncio.Task[None] | None:
        """Fail all open requests with `reason` and stay closed. Return the task to wait for."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._detach(WorkerFailed(reason))
        return self._task

    def _send(self, command: w.Command) -> None:
        if self._session is None:
            raise WorkerFailed(f"worker {self._member.worker_id} is not attached")
        if self._session.unsent_bytes > framing.MAX_UNSENT_BYTES:
            raise Overloaded(f"worker {self._member.worker_id} does not read its commands")
        self._session.send(command)

    def _detach(self, error: WorkerFailed) -> None:
        if self._session is None:
            return
        self._session = None
        self._observer.detached(self._member)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_lost(error)

    async def _run(self) -> None:
        name, pause_s = f"worker {self._member.worker_id}", BACKOFF_MIN_S
        while True:
            session = _Session(self._hello, self._on_frame)
            try:
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    await self._connect(self._member.info, lambda session=session: session)  # type: ignore[misc]
                    await session.welcomed
                await session.ended
                error = f"{name} closed the connection"
            except TimeoutError:
                error = f"{name} did not answer in {ATTACH_TIMEOUT_S:g} s"
            except OSError as cause:
                error = f"{name} cannot be reached: {cause}"
            except PdserveError as cause:
                error = f"{name} closed the connection: {cause.message}"
            except Exception:
                error = f"{name} sent what could not be handled"
                logger.exception("%s", error)
            finally:
                session.abort()
            logger.log(logging.WARNING if session.is_welcome else logging.DEBUG, "%s", error)
            self._detach(WorkerFailed(error))
            pause_s = BACKOFF_MIN_S if session.is_welcome else pause_s * 2
            pause_s = min(pause_s, BACKOFF_MAX_S)
            # Jitter, so that routers do not all return to a worker at the same moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _on_frame(self, session: _Session, frame: w.StepFrame) -> None:
        if self._is_closed:
            return
        if not session.is_welcome:  # the first frame accepts the hello
            session.welcome()
            self._session = session
            self._observer.attached(self._member)
        self.frames += 1
        if frame.HasField("load"):
            self._observer.reported(self._member, wire.load_from_pb(frame.load))
        if frame.HasField("steps"):
            member = self._member
            member.steps = moments_from_pb(frame.steps)
            # A copy: a part of a frame would keep all of it.
            member.recent_steps = w.RecentSteps()
            member.recent_steps.CopyFrom(frame.recent_steps)
            member.recent_steps_at = session.loop.time()
        if frame.HasField("cache"):
            self._observer.cache_changed(self._member, frame.cache)
        if frame.HasField("tokens"):
            self._on_tokens(frame.tokens, session.loop.time())
        sinks = self._sinks
        for message in frame.deltas:
            sink = sinks.get(message.stream_id)
            if sink is None:
                continue
            delta = wire.delta_from_pb(message)
            if delta.finish_reason is not None:
                del sinks[message.stream_id]
            sink.on_delta(delta)
        if not sinks:
            self._tokens_at = None

    def _on_tokens(self, tokens: w.PlainTokens, now: float) -> None:
        # Read each list once: every access to a field of a message makes a new object.
        stream_ids, token_ids, texts = tokens.stream_ids, tokens.token_ids, tokens.texts
        if not len(stream_ids) == len(token_ids) == len(texts):
            raise InvalidRequest("its lists differ in length", field="tokens")
        if self._gaps is not None and self._tokens_at is not None:
            self._gaps.observe(now - self._tokens_at, len(stream_ids))
        self._tokens_at = now
        sinks = self._sinks
        for stream_id, token_id, text in zip(stream_ids, token_ids, texts, strict=True):
            sink = sinks.get(stream_id)
            if sink is not None:
                sink.on_token(token_id, text)


class _Session(asyncio.Protocol):
    """One connection. `welcomed` is done when the worker has accepted the hello, `ended` when the
    connection is gone; both get the error if there is one."""

    def __init__(self, hello: w.Hello, on_frame: Callable[[_Session, w.StepFrame], None]) -> None:
        self._hello = hello
        self._on_frame = on_frame
        self._parser = framing.FrameParser(w.StepFrame)
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self.is_welcome = False
        self.welcomed: asyncio.Future[None] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of commands that the kernel has not taken."""
        assert self._transport is not None
        return self._outgoing_bytes + self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        detect_dead_peer(transport.get_extra_info("socket"), framing.PEER_TIMEOUT_S)
        self._transport.write(framing.pack(w.Command(hello=self._hello)))

    def welcome(self) -> None:
        self.is_welcome = True
        _settle(self.welcomed, None)

    def send(self, command: w.Command) -> None:
        """Send a command. The commands of one turn of the event loop go out in one write."""
        self._outgoing.append(framing.pack(command))
        self._outgoing_bytes += len(self._outgoing[-1])
        if len(self._outgoing) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
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
                    return  # the frame made the router drop this session
        except Exception as error:  # noqa: BLE001 - the connection's task reports it
            self.abort(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def abort(self, error: Exception | None = None) -> None:
        if self._transport is not None:
            self._transport.abort()
        _settle(self.welcomed, error or ConnectionError("it closed the connection"))
        _settle(self.ended, error)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # one that nobody waits for any more reports nothing
