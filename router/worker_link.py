"""The one stream that this router holds to one worker.

Commands go down in the order in which they were given; frames come up and each delta goes, at once
and without a task, to the sink of its stream. When the stream breaks, every sink hears of it, and
the link attaches anew, with growing pauses, until it is closed.

A worker answers Hello by sending its initial metadata; from then on the link takes work. Where the
worker offers it, frames and commands have a connection of their own (pdserve/frames.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio

from pdserve import lanes, rpc, wire
from pdserve.cost_wire import moments_from_pb
from pdserve.errors import Overloaded, WorkerFailed
from pdserve.frames import offer_in
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router import frame_connection
from router.histograms import Histogram
from router.token_gaps import BOUNDS_S, Pace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve._lanes import Lane
    from pdserve.errors import PdserveError
    from pdserve.step_moments import StepMoments
    from pdserve.types import StreamDelta, WorkerLoad
    from router.frame_connection import FrameConnection
    from router.member import Member

logger = logging.getLogger(__name__)

# A batch is sent once it has grown to this; a message must stay below rpc.MAX_MESSAGE_BYTES.
_BATCH_BYTES = 1 << 20
# Between the end of the stream and that of the frames: the network may have one later.
_LINGER_S = 2.0

AttachCall = grpc.aio.StreamStreamCall[w.Command, w.StepFrame]


class DeltaSink(Protocol):
    """Where the deltas of one stream go. Called from the reader, so it must not block."""

    def on_delta(self, delta: StreamDelta) -> None:
        """The next delta; none follows one with a finish reason."""
        ...

    def on_token(self, token_id: int, text: str) -> None:
        """A delta of one token that says nothing else: the common case."""
        ...

    def on_lost(self, error: PdserveError) -> None:
        """The stream ended without a last delta."""
        ...


class Outgoing(Protocol):
    """Where commands wait for a worker that does not read."""

    def put_nowait(self, command: w.Command) -> None:
        """Sends it behind those before it. Raises asyncio.QueueFull where too many wait."""
        ...


class LinkObserver(Protocol):
    """Who is told how a link fares. `detached` comes before the sinks hear of a break."""

    def attached(self, member: Member) -> None: ...

    def detached(self, member: Member) -> None: ...

    def reported(self, member: Member, load: WorkerLoad) -> None: ...

    def measured(self, member: Member, steps: StepMoments) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of a link: `max_outgoing` commands wait for a worker that does not read."""

    attach_timeout_s: float = 5.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    max_outgoing: int = 4096


class WorkerLink:
    """State: the open streams of one member and its outgoing commands. Owns one task and one
    channel, both ended by `close`."""

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        observer: LinkObserver,
        settings: LinkSettings | None = None,
        dialer: rpc.Dialer = rpc.PLAIN,
        gaps: Histogram | None = None,
    ) -> None:
        """`gaps` is told how its tokens follow one another."""
        self._member = member
        self._pace = Pace(gaps or Histogram(BOUNDS_S))
        self._router_id = router_id
        self._dialer = dialer
        self._observer = observer
        self._settings = settings or LinkSettings()
        self._sinks: dict[int, DeltaSink] = {}
        self._lanes: dict[int, Lane] = {}
        self._last_stream_id = 0
        self._outgoing: Outgoing | None = None
        self._call: AttachCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._takes_frames_apart = True  # until that was tried in vain
        self.frames = 0  # how many have come, over all streams

    @property
    def open_streams(self) -> int:
        return len(self._sinks)

    def start(self) -> None:
        """Attach in the background."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self._member.worker_id}")

    def submit(self, command: w.Command, sink: DeltaSink, forks: Sequence[DeltaSink] = ()) -> int:
        """Send a submit command under a new stream id, which is returned; those of its forks, whose
        sinks are `forks`, follow it. Raises WorkerFailed where the link is down and Overloaded
        where the worker does not read its commands."""
        submit = command.submit
        submit.stream_id = self._last_stream_id + 1
        for stream_id, fork in enumerate(submit.forks, start=submit.stream_id + 1):
            fork.stream_id = stream_id
        self._last_stream_id += 1 + len(forks)
        self._send(command)
        self._sinks.update(enumerate((sink, *forks), start=submit.stream_id))
        return submit.stream_id

    def export(self, stream_id: int, transfer_id: str) -> None:
        """Ask for a stream's end, with its KV kept for whoever presents `transfer_id`. Its last
        delta says what came of it; unknown streams are ignored. Raises as `submit`."""
        if stream_id in self._sinks:
            export = w.Export(stream_id=stream_id, transfer_id=transfer_id)
            self._send(w.Command(export=export))

    def _send(self, command: w.Command) -> None:
        if self._outgoing is None:
            raise WorkerFailed(f"worker {self._member.worker_id} is not attached")
        try:
            self._outgoing.put_nowait(command)
        except asyncio.QueueFull:
            raise Overloaded(
                f"worker {self._member.worker_id} does not read its commands"
            ) from None

    def take_lane(self, stream_id: int, lane: Lane) -> None:
        """Plain tokens of an open stream go over `lane` when it takes them, past its sink."""
        if stream_id in self._sinks:
            self._lanes[stream_id] = lane

    def cancel(self, stream_id: int, *, ended: bool = False) -> None:
        """Stop a stream; its sink hears nothing more. Unknown streams are ignored. `ended` is for a
        prefill whose last delta came but whose blocks nobody will take."""
        known = self._sinks.pop(stream_id, None) is not None
        self._lanes.pop(stream_id, None)
        if not (known or ended) or self._outgoing is None:
            return
        try:
            self._outgoing.put_nowait(w.Command(cancel=w.Cancel(stream_id=stream_id)))
        except asyncio.QueueFull:
            # A cancel must not get lost; a worker ends every request of a stream that ends.
            if self._call is not None:
                self._call.cancel()

    def drop(self, error: WorkerFailed) -> None:
        """Fail what is open with `error`, at once, and attach anew: the worker cancels all that
        came over a stream that ends."""
        if self._call is not None:
            self._call.cancel()
        self._detach(error)

    def close(self, reason: str) -> asyncio.Task[None] | None:
        """Fail what is open with `reason` and attach no more. Returns the task to wait for."""
        if self._task is not None:
            self._task.cancel()
        self._detach(WorkerFailed(reason))
        return self._task

    def _detach(self, error: WorkerFailed) -> None:
        if self._outgoing is None:
            return
        self._outgoing = self._call = None
        self._observer.detached(self._member)
        sinks, self._sinks = self._sinks, {}
        self._lanes.clear()
        for sink in sinks.values():
            sink.on_lost(error)

    async def _run(self) -> None:
        settings = self._settings
        pause_s = settings.backoff_min_s
        async with self._dialer.open_channel(self._member.info.address) as channel:
            while True:
                error = await self._serve(
                    WorkerStub(channel).Attach(metadata=self._dialer.metadata)
                )
                was_attached = self._outgoing is not None
                logger.log(
                    logging.WARNING if was_attached else logging.DEBUG, "link: %s", error.message
                )
                self._detach(error)
                pause_s = settings.backoff_min_s if was_attached else pause_s * 2
                pause_s = min(pause_s, settings.backoff_max_s)
                # Jitter, so that routers do not come back to a worker all at once.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _serve(self, call: AttachCall) -> WorkerFailed:
        """One stream, from Hello to its end, and why it ended."""
        name = f"worker {self._member.worker_id}"
        try:
            apart = await self._greet(call)
            await self._exchange(call, apart)
            return WorkerFailed(f"{name} ended the stream")
        except WorkerFailed as error:
            return error
        except grpc.aio.AioRpcError as error:
            return WorkerFailed(f"{name} broke off: {rpc.error_from_rpc(error).message}")
        except TimeoutError:
            return WorkerFailed(f"{name} did not answer in {self._settings.attach_timeout_s:g} s")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return WorkerFailed(f"{name} did not read its commands")
        except Exception:
            logger.exception("link: %s sent what could not be handled", name)
            return WorkerFailed(f"{name} sent what could not be handled")
        finally:
            call.cancel()

    async def _greet(self, call: AttachCall) -> FrameConnection | None:
        """Where frames come from, if not over the stream. Raises WorkerFailed where that cannot be
        reached; the next stream does without."""
        info = self._member.info
        hello = w.Hello(
            router_id=self._router_id,
            instance_id=info.instance_id,
            takes_frames_apart=self._takes_frames_apart,
        )
        async with asyncio.timeout(self._settings.attach_timeout_s):
            await call.write(w.Command(hello=hello))
            offer = offer_in(await call.initial_metadata())
        if call.done():
            # A refusal comes with empty initial metadata; reading raises its status.
            await call.read()
        if offer is None:
            return None
        try:
            return await frame_connection.connect(
                info.address,
                offer,
                self._dispatch,
                within_s=self._settings.attach_timeout_s,
                max_waiting=self._settings.max_outgoing,
            )
        except OSError as error:
            self._takes_frames_apart = False
            why = f"port {offer.port} of worker {info.worker_id} cannot be reached: {error}"
            logger.warning("link: %s; its frames will come over gRPC", why)
            raise WorkerFailed(why) from error

    async def _exchange(self, call: AttachCall, apart: FrameConnection | None) -> None:
        self._call, writer = call, None
        if apart is not None and apart.takes_commands:
            self._outgoing = apart
        else:
            queue: asyncio.Queue[w.Command] = asyncio.Queue(self._settings.max_outgoing)
            self._outgoing, writer = queue, asyncio.create_task(_write(call, queue))
        try:
            if apart is not None:
                apart.start()
            self._observer.attached(self._member)
            if apart is not None:
                await _read_apart(call, apart)
                return
            while isinstance(frame := await call.read(), w.StepFrame):
                self._dispatch(frame)
        finally:
            if apart is not None:
                apart.close()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])

    def _dispatch(self, frame: w.StepFrame) -> None:
        if self._outgoing is None:
            return  # the link was dropped
        self.frames += 1
        if frame.HasField("load"):
            self._observer.reported(self._member, wire.load_from_pb(frame.load))
        if frame.HasField("steps"):
            self._observer.measured(self._member, moments_from_pb(frame.steps))
        sinks = self._sinks
        stream_ids, token_ids, texts = (
            frame.tokens.stream_ids,
            frame.tokens.token_ids,
            frame.tokens.texts,
        )
        if stream_ids:
            self._pace.took(time.monotonic(), len(stream_ids))
        for i in lanes.pass_on(self._lanes, stream_ids, token_ids, texts):
            sink = sinks.get(stream_ids[i])
            if sink is not None:
                sink.on_token(token_ids[i], texts[i])
        for message in frame.deltas:
            sink = sinks.get(message.stream_id)
            if sink is None:
                continue
            delta = wire.delta_from_pb(message)
            if delta.finish_reason is not None:
                del sinks[message.stream_id]
                self._lanes.pop(message.stream_id, None)
            sink.on_delta(delta)
        if not sinks:
            self._pace.rest()


async def _read_apart(call: AttachCall, apart: FrameConnection) -> None:
    """Frames come apart; what the stream brings is its end. Raises what that raises, and what a
    frame did."""
    end = asyncio.ensure_future(call.read())
    try:
        ends: set[asyncio.Future[Any]] = {end, apart.ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if apart.ended.done():
            apart.ended.result()
        if end.done():
            end.result()
        await asyncio.wait(ends, timeout=_LINGER_S)
        if end.done():
            end.result()
    finally:
        end.cancel()


async def _write(call: AttachCall, outgoing: asyncio.Queue[w.Command]) -> None:
    """The only writer of a stream. Where it cannot go on, the reader learns it from the call."""
    try:
        while True:
            first = await outgoing.get()
            # What came in the same turn of the loop has its commands ready after one more.
            await asyncio.sleep(0)
            await call.write(_waiting(first, outgoing))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        call.cancel()


def _waiting(first: w.Command, outgoing: asyncio.Queue[w.Command]) -> w.Command:
    """All that waits as one command: a message costs both ends more than what is in it."""
    if outgoing.empty():
        return first
    commands, size = [first], first.ByteSize()
    while not outgoing.empty() and size < _BATCH_BYTES:
        commands.append(outgoing.get_nowait())
        size += commands[-1].ByteSize()
    return w.Command(batch=w.Batch(commands=commands))
