"""One router's TCP connection to a worker: it carries commands to the worker and step frames
back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from pdserve import wire
from pdserve.errors import Cancelled, InternalError, InvalidRequest, PdserveError
from pdserve.net import framing
from pdserve.net.sockets import detect_dead_peer
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.security.roles import Guard
    from pdserve.types import WorkerLoad

logger = logging.getLogger(__name__)

# A link is closed if its router sends no hello in HELLO_S, and aborted if the router does not read
# the rest in LINGER_S after `close`.
HELLO_S = 10.0
LINGER_S = 5.0
# Routers report a worker that is silent for several beats as stalled.
BEAT_S = 0.5
# Limits of links without a hello: the peer is not authenticated yet.
_HELLO_BYTES = 1 << 12
MAX_STRANGERS = 64


class CommandHandler(Protocol):
    """Executes the commands of links. Stream ids are the engine's."""

    def attach(self, link: RouterLink) -> None:
        """Accept a link after its hello."""
        ...

    def detach(self, link: RouterLink) -> None:
        """Cancel all requests of a link that has ended."""
        ...

    def submit(self, link: RouterLink, submit: w.Submit) -> None: ...

    def cancel(self, stream_id: int, reason: str) -> None: ...

    def export(self, stream_id: int, transfer_id: str) -> None: ...

    def watch_cache(self, link: RouterLink) -> None: ...

    def beat(self, link: RouterLink) -> None:
        """Send a frame if the router needs one. Called after BEAT_S without a frame."""
        ...


class OpenLinks:
    """The open links of a worker, including links without a hello."""

    def __init__(self) -> None:
        self._links: set[RouterLink] = set()
        self._numbers = itertools.count(1)
        self._is_closing = False

    def __iter__(self) -> Iterator[RouterLink]:
        return iter(tuple(self._links))

    def admit(self, link: RouterLink) -> int | None:
        """Add a link and return its unique number. Return None if the worker closes, or if too many
        links have sent no hello."""
        if self._is_closing or sum(not x.router_id for x in self._links) >= MAX_STRANGERS:
            return None
        self._links.add(link)
        return next(self._numbers)

    def of_router(self, router_id: str) -> RouterLink | None:
        """Return the link that a router uses. None if it has none."""
        return next((x for x in self._links if x.router_id == router_id and x.is_open), None)

    def remove(self, link: RouterLink) -> None:
        self._links.discard(link)

    def close(self) -> None:
        """Close every link once its queued frames are sent, and admit no new link."""
        self._is_closing = True
        for link in self:
            link.close()

    async def closed(self) -> None:
        """Close the links, and return when all frames are sent, or LINGER_S have passed."""
        self.close()
        if self._links:
            await asyncio.wait([link.closed for link in self._links])


@dataclass(slots=True)
class ReportedToRouter:
    """What a router knows of this worker: the load sent last, and when step costs were. It gets
    each change of the prefix cache if it `watches_cache`. `renewals`: those it has not acknowledged
    yet, by number; each gets the lease in seconds."""

    load: WorkerLoad | None = None
    steps_at: float = -math.inf
    watches_cache: bool = False
    renewals: dict[int, asyncio.Future[float]] = field(default_factory=dict)


class RouterLink(asyncio.Protocol):
    """One connection of a router.

    State: its open streams, and what was `reported` to it. The engine's stream ids are
    `first_stream_id` plus the router's. A connection with more than `max_unsent_bytes` unsent is
    aborted.
    """

    def __init__(
        self,
        instance_id: str,
        commands: CommandHandler,
        links: OpenLinks,
        guard: Guard | None = None,
        *,
        max_unsent_bytes: int = framing.MAX_UNSENT_BYTES,
    ) -> None:
        self.router_id = ""
        self.first_stream_id = 0  # once connected
        self.streams: set[int] = set()  # by the engine's ids
        self.reported = ReportedToRouter()
        self._instance_id = instance_id
        self._commands = commands
        self._links = links
        self._guard = guard
        self._max_unsent_bytes = max_unsent_bytes
        self._parser = framing.FrameParser(w.Command, limit=_HELLO_BYTES)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle  # deadline of the hello, next beat, or end of lingering
        self._sent_at = 0.0
        self._transport: asyncio.Transport
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        detect_dead_peer(transport.get_extra_info("socket"), framing.PEER_TIMEOUT_S)
        late = InvalidRequest("no hello came", field="hello")
        self._timer = self._loop.call_later(HELLO_S, self.close, late)
        number = self._links.admit(self)
        if number is None:
            self._transport.abort()
        else:
            self.first_stream_id = number << 64

    def data_received(self, data: bytes) -> None:
        try:
            for command in self._parser.feed(data):
                if self._transport.is_closing():
                    return
                self._take(command)
        except PdserveError as error:
            self.close(error)
        except Exception:
            logger.exception("the link of router %s failed", self.router_id or "?")
            self.close(InternalError("the worker could not handle a command"))

    def _take(self, command: w.Command) -> None:
        kind = command.WhichOneof("command")
        if not self.router_id and kind != "hello":
            raise InvalidRequest("the first command must be hello", field="command")
        match kind:
            case "hello" if not self.router_id:
                self._greet(command.hello)
            case "submit":
                self._commands.submit(self, command.submit)
            case "cancel":
                self._cancel(command.cancel)
            case "export":
                stream_id = self.first_stream_id + command.export.stream_id
                self._commands.export(stream_id, command.export.transfer_id)
            case "watch_cache":
                self._commands.watch_cache(self)
            case "ping":
                self.send(w.StepFrame(pong=command.ping))
            case "renewed":
                self._on_renewed(command.renewed)
            case _:
                raise InvalidRequest(f"unexpected command {kind}", field="command")

    def _cancel(self, cancel: w.Cancel) -> None:
        reason = cancel.reason or Cancelled.code
        if not wire.is_name(reason):
            raise InvalidRequest(f"{reason[:64]!r} is no reason", field="cancel.reason")
        self._commands.cancel(self.first_stream_id + cancel.stream_id, reason)

    def _greet(self, hello: w.Hello) -> None:
        if self._guard is not None:
            self._guard.check_link(self._transport, hello.token)
        if not hello.router_id:
            raise InvalidRequest("hello.router_id is missing", field="hello.router_id")
        if hello.instance_id != self._instance_id:
            raise InvalidRequest(
                f"this worker's instance is {self._instance_id}", field="hello.instance_id"
            )
        self.router_id = hello.router_id
        self._parser.limit = framing.MAX_FRAME_BYTES
        self._beat_in(BEAT_S)
        self._commands.attach(self)

    def _on_renewed(self, renewed: w.RenewResponse) -> None:
        renewal = self.reported.renewals.get(renewed.number)
        # One that is not known or done came too late.
        if renewal is not None and not renewal.done():
            renewal.set_result(renewed.lease_s)

    @property
    def is_open(self) -> bool:
        """True if a router has sent its hello and the link is not about to close."""
        return bool(self.router_id) and not self._transport.is_closing()

    async def renew(self, renewal: w.RenewRequest, within_s: float) -> float | None:
        """Renew the lease. Return its seconds, or None if the router does not acknowledge it
        `within_s`, or the link ends."""
        renewals, number = self.reported.renewals, renewal.number
        renewals[number] = lease_s = self._loop.create_future()
        try:
            self.send(w.StepFrame(renewal=renewal))
            ends = asyncio.FIRST_COMPLETED
            await asyncio.wait([lease_s, self.closed], timeout=within_s, return_when=ends)
            return lease_s.result() if lease_s.done() else None
        finally:
            del renewals[number]

    def send(self, frame: w.StepFrame) -> None:
        """Send a frame. Does nothing after the connection has closed."""
        if self._transport.is_closing():
            return
        self._sent_at = self._loop.time()
        self._transport.write(framing.pack(frame))
        if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            logger.warning("router %s does not read its frames: dropped", self.router_id)
            self._transport.abort()

    def close(self, error: PdserveError | None = None) -> None:
        """Send the queued frames and the error, then close. Later calls do nothing."""
        if self._transport.is_closing():
            return
        if error is not None:
            self.send(w.StepFrame(closed=wire.error_to_pb(error)))
        self._transport.close()
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._links.remove(self)
        self.closed.set_result(None)
        if self.router_id:
            self._commands.detach(self)

    def _beat_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._beat)

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._sent_at
        if silent_s >= BEAT_S:
            self._commands.beat(self)
            silent_s = 0.0
        self._beat_in(BEAT_S - silent_s)
