"""One connection between a target worker, which dialled, and a source worker.

Two threads a link: a reader and a writer. The outbox keeps everything in order: messages, chunks,
and the message that says "done" behind them; who has put something in may also write it, with
`flush` (outbox.py). Whatever breaks ends the link, once, through `on_down`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from kv_transfer.errors import HandshakeRefused, KvTransferError, LinkClosed, ProtocolError
from kv_transfer.handshake import Identity, hello_of, refusal_of
from kv_transfer.messages import (
    Hello,
    Inner,
    Message,
    Refusal,
    Welcome,
    encode,
)
from kv_transfer.outbox import Job, Outbox
from kv_transfer.stream import Stream
from kv_transfer.transport.base import (
    LocalKv,
    SourceChannel,
    Talks,
    TargetChannel,
    Transport,
    TransportUnavailable,
    Wire,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# What a thread that flushes may push by itself: the reader, which nobody waits for, a chunk; any
# other thread, an engine's step among them, what is copied sooner than the writer wakes.
READER_BYTES = 16 << 20
VISITOR_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """`handshake_s` from connecting to the end of the handshake; `send_s` for a peer that reads
    nothing."""

    handshake_s: float
    send_s: float


class LinkOwner(Protocol):
    """Who a link reports to; called on the link's threads."""

    def on_up(self, link: Link) -> None:
        """The handshake is over; `source` or `target` is set."""
        ...

    def on_message(self, link: Link, message: Message) -> None:
        """A message that is not part of the handshake."""
        ...

    def on_down(self, link: Link, reason: str) -> None:
        """The link is gone. Called once."""
        ...


def _refuse(error: ProtocolError) -> None:
    raise error


class Link:
    """See the top of the file. Either `source` or `target` is set once the handshake is over."""

    def __init__(
        self,
        owner: LinkOwner,
        local: LocalKv,
        transports: Sequence[Transport],
        timeouts: LinkTimeouts,
    ) -> None:
        self._owner = owner
        self._local = local
        self._transports = {t.name: t for t in transports}
        self._timeouts = timeouts
        self._stream = Stream()
        self._outbox = Outbox(self._stream.write, self._stream.write_some)
        self._down = threading.Event()
        self._down_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._reader_ident: int | None = None
        self._writer: threading.Thread | None = None
        self.source: SourceChannel | None = None
        self.target: TargetChannel | None = None
        self.peer_instance_id = ""
        self.peer_address = ""  # host:port of the other end's socket
        self.is_dialled = False  # by us, as the target
        self.opened_at = time.monotonic()
        self.is_blamed = False  # the peer sent what makes no sense
        self.downgrades: list[str] = []
        self.reason = ""  # why it is down

    # -- making one

    def dial(self, address: str, identity: Identity, producer_instance_id: str, slot: int) -> None:
        """Connects as the target, in the background; what is queued meanwhile waits its turn."""
        self.peer_address, self.is_dialled = address, True
        self._begin(lambda: self._dial(address, identity, producer_instance_id, slot))

    def serve(self, sock: socket.socket, identity: Identity) -> None:
        """Answers as the source, in the background."""
        with contextlib.suppress(OSError):
            self.peer_address = "{}:{}".format(*sock.getpeername()[:2])
        self._stream.sock = sock
        self._begin(lambda: self._serve(sock, identity))

    @property
    def is_down(self) -> bool:
        return self._down.is_set()

    @property
    def is_over(self) -> bool:
        """Down, and no thread touches memory for it any more."""
        is_busy = self._outbox.has_visitor or any(t.is_alive() for t in self._threads)
        return self.is_down and not is_busy

    @property
    def is_stranger(self) -> bool:
        """Whether somebody has connected and is not known to be a worker that fits."""
        return not self.is_dialled and self.source is None and not self.is_down

    @property
    def was_dropped(self) -> bool:
        """Of one that is down: whether whoever connected never was such a worker, or misbehaved."""
        return not self.is_dialled and (self.source is None or self.is_blamed)

    @property
    def transport(self) -> str:
        """The negotiated transport's name, or "" before the handshake is over."""
        channel = self.source or self.target
        return "" if channel is None else channel.name

    def send(self, message: Message) -> None:
        """Queues a message behind whatever is queued. `flush` sets it going."""
        self._outbox.put(self._written(message))

    def send_next(self, message: Message) -> None:
        """Queues a message before all that waits, behind what is being written now."""
        self._outbox.put_next(self._written(message))

    def run(self, work: Callable[[], None], size: int = 0) -> None:
        """Queues work, in order with the messages, which moves `size` bytes of KV."""
        self._outbox.put(Job(work, size))

    def write(self, message: Message) -> None:
        """For queued work: the message comes next."""
        self._outbox.write(encode(message))

    def flush(self) -> None:
        """Sets going what is queued: on this thread as far as that is quick and waits for nobody,
        else on the writer's. To be called without a lock that queued work takes."""
        limit = 0
        if self.source is not None:
            is_reader = threading.get_ident() == self._reader_ident
            limit = READER_BYTES if is_reader else VISITOR_BYTES
            limit = min(limit, self.source.unwaited_bytes)
        self._until_broken(self._outbox.flush, limit)

    def hand_over(self) -> None:
        """Has the writer's thread set going what is queued: whoever calls has no time."""
        self._outbox.hand_over()

    def close(self, reason: str) -> None:
        """Ends the link; idempotent, does not wait for its threads."""
        with self._down_lock:
            if self._down.is_set():
                return
            self.reason = reason
            self._down.set()
        self._stream.shut()
        self._outbox.close()
        self._owner.on_down(self, reason)

    def join(self, timeout_s: float) -> None:
        """Waits for the link's threads after `close`."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    # -- threads

    def _begin(self, connect: Callable[[], None]) -> None:
        self._stream.handshake_end = time.monotonic() + self._timeouts.handshake_s
        self._spawn(lambda: self._run(connect))

    def _spawn(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, daemon=True, name="kv-link")
        thread.start()
        self._threads.append(thread)
        return thread

    def _run(self, connect: Callable[[], None]) -> None:
        self._reader_ident = threading.get_ident()
        try:
            self._until_broken(self._read_loop, connect)
        finally:
            self.close("closed")
            if self._writer is not None:
                self._writer.join()
            self._outbox.wait_for_visitor()
            for channel in (self.source, self.target):
                # A fenced target still asks its channel whether it is idle; that needs no socket.
                if channel is not None:
                    channel.close()
            self._stream.close()

    def _read_loop(self, connect: Callable[[], None]) -> None:
        connect()
        self._stream.handshake_end = None
        self._owner.on_up(self)
        self._writer = self._spawn(partial(self._until_broken, self._outbox.serve))
        while not self._down.is_set():
            message = self._stream.read()
            if isinstance(message, Inner):
                self._tell_channel(message)
            else:
                self._owner.on_message(self, message)

    def _until_broken(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Whatever it raises ends the link."""
        try:
            work(*args, **kwargs)
        except (OSError, KvTransferError) as error:
            self.is_blamed |= isinstance(error, ProtocolError)
            self.close(str(error) or type(error).__name__)
        except Exception as error:
            logger.exception("KV link to %s failed", self._peer())
            self.close(f"{type(error).__name__}: {error}")

    def _tell_channel(self, message: Inner) -> None:
        channel: object = self.source or self.target
        if not isinstance(channel, Talks):
            raise ProtocolError(f"an inner message where {self.transport} has none")
        channel.told(message.body)

    def _written(self, message: Message) -> Job | bytes:
        try:
            return encode(message)
        except ProtocolError as error:
            return Job(partial(_refuse, error))  # ends the link when it is its turn

    def _post(self, message: Message) -> None:
        self.send_next(message)
        self.flush()

    def _peer(self) -> str:
        return self.peer_instance_id or "a peer without a name"

    # -- handshake

    def _open(self, sock: socket.socket) -> Wire:
        stream = self._stream
        stream.open(sock, self._timeouts.send_s)
        if self._down.is_set():
            raise LinkClosed("closed before it was up")
        return Wire(
            sock,
            self._outbox.write,
            stream.fill,
            stream.take,
            self._outbox.has_more,
            stream.read,
            stream.can_read,
            self._post,
            self._down.is_set,
        )

    def _dial(self, address: str, identity: Identity, producer_instance_id: str, slot: int) -> None:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), self._timeouts.handshake_s)
        except (ValueError, OverflowError) as error:
            raise KvTransferError(f"{address!r} is no address") from error
        wire = self._open(sock)
        offers = [t.offer(self._local, slot) for t in self._transports.values()]
        self._stream.write(encode(hello_of(identity, producer_instance_id, offers)))
        answer = self._stream.read()
        if isinstance(answer, Refusal):
            raise HandshakeRefused(answer.reason)
        if not isinstance(answer, Welcome) or answer.transport not in self._transports:
            raise ProtocolError("the source did not answer the handshake")
        if answer.instance_id != producer_instance_id:
            raise HandshakeRefused("the source has been restarted")
        self.peer_instance_id = answer.instance_id
        self.target = self._transports[answer.transport].target(self._local, slot, wire)
        sock.settimeout(None)

    def _serve(self, sock: socket.socket, identity: Identity) -> None:
        wire = self._open(sock)
        hello = self._stream.read()
        if not isinstance(hello, Hello):
            raise ProtocolError("the target did not begin with a handshake")
        refusal = refusal_of(hello, identity)
        if refusal is None:
            self.source = self._choose(hello.offers, wire)
            if self.source is None:
                refusal = "no common transport: " + "; ".join(self.downgrades)
        if refusal is not None or self.source is None:
            self._stream.write(encode(Refusal(refusal or "")))
            raise HandshakeRefused(refusal or "")
        self.peer_instance_id = hello.instance_id
        self._stream.write(encode(Welcome(identity.instance_id, self.source.name)))
        sock.settimeout(None)

    def _choose(self, offers: list[dict[str, Any]], wire: Wire) -> SourceChannel | None:
        for offer in offers:
            transport = self._transports.get(str(offer.get("transport")))
            if transport is None:
                continue
            try:
                return transport.source(self._local, offer, wire)
            except TransportUnavailable as error:
                self.downgrades.append(f"{transport.name}: {error}")
                logger.warning("transport %s cannot be used: %s", transport.name, error)
        return None
