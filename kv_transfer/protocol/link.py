"""A connection between two workers: its socket and its queue of items to write.

One thread reads (link_threads.py); one thread at a time writes (driver.py). Any thread may call
`post`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.errors import HandshakeRefused, LinkClosed, ProtocolError
from kv_transfer.protocol.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    KvMessage,
    body_length,
    decode,
    encode,
)
from kv_transfer.protocol.tls_stream import RECORD_BYTES, TlsStream
from pdserve.net.sockets import detect_dead_peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.protocol.producer import SendChunk

# A consumer closes the link after this many seconds without a response of the producer's kernel.
# The kernel responds even if the process is busy, so this is much shorter than receive_timeout_s.
DEAD_PEER_S = 5
SOCKET_BUFFER_BYTES = 4 << 20
READ_AHEAD_BYTES = RECORD_BYTES
_IOV_MAX = 512
# How TLS begins. As the length of a message, it exceeds the limit.
_TLS = (b"\x16\x03\x01", b"\x16\x03\x03")


class Channel:
    """A transport's end of one link."""

    name: str

    def on_inner(self, body: bytes) -> None:
        """Handle an Inner message that arrived outside of `receive`. Must not block."""
        raise ProtocolError(f"{self.name} has no messages of its own")

    def close(self) -> None:
        """Release the resources of this end."""


class ProducerChannel(Channel):
    """The sending end."""

    # True if `send` neither copies nor waits, so that any thread may call it.
    is_quick = False
    # One `send` takes up to so many times `chunk_bytes`.
    send_chunks = 1

    def open(self) -> None:
        """Do slow preparations before the first chunk. Called on the link's writer thread when the
        first subscription arrives, because a link that only cancels needs none."""

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        """Announce the chunk and send the blocks, `part` of each page, or start to.

        The blocks may be overwritten once the returned copy has ended. If the consumer copies by
        itself, it has ended at once; if the blocks change during the consumer's copy, the digests
        do not match. Nothing is being sent if this raises.
        """
        raise NotImplementedError


class ConsumerChannel(Channel):
    """The receiving end."""

    # True if `receive` copies from the producer's memory when the chunk is announced. The producer
    # does not wait for it, so it may have announced later chunks already.
    is_pull = False

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        """Write the chunk into these blocks, or start to. With None, discard it. Only digests at
        the positions `checked` are required.

        Runs on the link's reader thread, which waits for the returned copies in order. No write is
        in progress if this raises.
        """
        raise NotImplementedError


class Sending(NamedTuple):
    """A chunk that is being sent. `begun`: start of the copy. `size`: in bytes."""

    chunk: SendChunk[Link]
    copy: BlockCopy
    begun: float
    size: int


class Link:
    """One connection. The handshake sets `producer` or `consumer`, this end's channel."""

    def __init__(self, address: str, *, is_dialled: bool) -> None:
        self.peer_address = address
        self.is_dialled = is_dialled
        self.opened_at = time.monotonic()
        self.peer_instance_id = ""
        self.producer: ProducerChannel | None = None
        self.consumer: ConsumerChannel | None = None
        self._opening: bool | None = None  # None: no subscription has arrived
        self.reason = ""  # why the link is down
        self.downgrade = ""  # slower transport in use, with the reason; "" if none
        self.is_blamed = False  # the peer violated the protocol
        self.is_over = False  # down, and its threads have ended
        self.thread: threading.Thread | None = None
        self.handshake_end: float | None = None
        self._sock: socket.socket | None = None
        self._tls: TlsStream | None = None
        self._down = threading.Event()
        self._changed = threading.Condition()
        self.writing = threading.Lock()  # held by the thread that writes
        self._queue: deque[KvMessage | SendChunk[Link]] = deque()
        self.sending: deque[Sending] = deque()  # oldest first; used by the writer thread
        self._unsent = b""
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]
        self._unread: deque[KvMessage] = deque()

    @property
    def transport(self) -> str:
        """Name of the negotiated transport; "" until the handshake completes."""
        channel = self.producer or self.consumer
        return "" if channel is None else channel.name

    @property
    def is_down(self) -> bool:
        return self._down.is_set()

    @property
    def peer(self) -> str:
        """Instance id of the other worker, or its address while the id is unknown."""
        return self.peer_instance_id or self.peer_address

    # -- the socket's life

    @property
    def sock(self) -> socket.socket:
        if self._sock is None:
            raise LinkClosed("the link is not connected")
        return self._sock

    def open(self, sock: socket.socket, send_timeout_s: float) -> None:
        """Attach a socket. The link ends if the peer reads nothing for `send_timeout_s`."""
        self._sock = sock
        # A busy consumer may leave a producer's data unread for long. A producer always reads, so
        # the consumer can use the short limit.
        detect_dead_peer(sock, DEAD_PEER_S if self.is_dialled else int(send_timeout_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        limit = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self.is_down:
            raise LinkClosed(self.reason)

    @property
    def stream(self) -> socket.socket | TlsStream:
        """Bytes in and out of the socket."""
        return self._tls or self.sock

    def begin_tls(self, tls: TlsStream) -> None:
        self._tls = tls

    def end_handshake(self, timeout_s: float, *, keeps_tls: bool) -> None:
        """End TLS unless the link keeps it. Call it at both ends, and before the channels are set,
        because any thread may send then."""
        if self._tls is not None and not keeps_tls:
            self._ahead = memoryview(self._tls.end(timeout_s))
            self._tls = None
        self.handshake_end = None
        self.sock.settimeout(None)

    @property
    def is_worn(self) -> bool:
        """True if another link must replace this one, because its keys have encrypted enough."""
        return self._tls is not None and self._tls.is_worn

    def close(self, reason: str) -> bool:
        """Mark the link as down and wake its threads. Return False if it was down already."""
        with self._changed:
            if self.is_down:
                return False
            self.reason = reason
            self._down.set()
            self._changed.notify_all()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread blocked in the kernel
        return True

    def release(self) -> None:
        """Close channel and socket. Call it when no thread uses the link."""
        for channel in (self.producer, self.consumer):
            if channel is not None:
                channel.close()
        if self._sock is not None:
            self._sock.close()

    # -- writing

    def post(self, item: KvMessage | SendChunk[Link]) -> None:
        """Queue a message or a chunk for the writer thread. Never blocks."""
        self.queue(item)
        self.wake_writer()

    def queue(self, item: KvMessage | SendChunk[Link]) -> None:
        """Queue an item without waking the writer thread. Only for `Driver`, which sends it."""
        self._queue.append(item)

    @property
    def has_items(self) -> bool:
        """True if something is left to write."""
        return bool(self._queue or self._unsent)

    def wake_writer(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def open_producer(self) -> None:
        """Have the writer thread open the producer's channel, once."""
        if self._opening is None:
            self._opening = True
            self.wake_writer()

    def take_opening(self) -> ProducerChannel | None:
        """Writer thread: return the channel to open, once."""
        if not self._opening:
            return None
        self._opening = False
        return self.producer

    def wait_for_items(self) -> bool:
        """Writer thread: return True when something is queued or to be opened, False when the link
        is down."""
        with self._changed:
            while not (self.has_items or self._opening or self.is_down):
                self._changed.wait()
            return not self.is_down

    def take(self) -> KvMessage | SendChunk[Link] | None:
        """Return the next queued item. The caller holds `writing`."""
        return self._queue.popleft() if self._queue and not self.is_down else None

    def put_back(self, item: KvMessage | SendChunk[Link]) -> None:
        self._queue.appendleft(item)

    def write(self, message: KvMessage) -> None:
        """Send a message, waiting for the peer. The caller holds `writing`."""
        self.write_pieces([memoryview(encode(message))])

    def buffer(self, message: KvMessage) -> None:
        """Buffer a message until the next write or `send_buffered`. The caller holds `writing`."""
        self._unsent += encode(message)

    def send_buffered(self) -> None:
        """Send as much of the buffer as the socket accepts without blocking. The caller holds
        `writing`."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.stream.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[sent:]

    def write_pieces(self, pieces: Sequence[memoryview]) -> None:
        """Send all bytes of the pieces in order, without copying them if the link is plain. The
        caller holds `writing`."""
        unsent, self._unsent = self._unsent, b""
        rest, at = [memoryview(unsent), *pieces] if unsent else list(pieces), 0
        try:
            while at < len(rest):
                sent = self.stream.sendmsg(rest[at : at + _IOV_MAX])
                at = _advance(rest, at, sent)
        except BlockingIOError as error:
            raise LinkClosed("the peer reads nothing") from error

    def send_handshake(self, message: KvMessage) -> None:
        self._limit()
        self.write(message)

    # -- reading

    def has_input(self, wait_s: float = 0.0) -> bool:
        """Reader thread: wait up to `wait_s`. Return True if bytes of the next message have
        arrived, or the link has ended."""
        if self._unread or self._ahead or (self._tls is not None and self._tls.has_pending):
            return True
        arrived = select.poll()  # `select.select` takes no descriptor above 1023
        arrived.register(self.sock, select.POLLIN)
        return bool(arrived.poll(wait_s * 1000))

    def has_peer_left(self) -> bool:
        """Reader thread: return True if the link is down or the peer has closed it, also while
        messages from before are unread."""
        closed = select.poll()
        closed.register(self.sock, select.POLLRDHUP)
        return self.is_down or bool(closed.poll(0))

    def unread(self, messages: Sequence[KvMessage]) -> None:
        """Reader thread: let `read` return these messages again, in this order."""
        self._unread.extendleft(reversed(messages))

    def read(self) -> KvMessage:
        """Reader thread: return the next message."""
        if self._unread:
            return self._unread.popleft()
        if not self._ahead:
            # Most messages are short and some arrive in pairs. Read them all with one system call.
            self._ahead = self._buffer[: self._receive_into(self._buffer)]
        limit = MAX_MESSAGE_BYTES if self.handshake_end is None else MAX_HANDSHAKE_BYTES
        ahead = self._ahead
        if len(ahead) >= HEADER.size:
            end = HEADER.size + self._length_in(ahead[: HEADER.size], limit)
            if end <= len(ahead):
                self._ahead = ahead[end:]
                return decode(ahead[HEADER.size : end])
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)])
        body = bytearray(self._length_in(header, limit))
        self.fill([memoryview(body)])
        return decode(body)

    def _length_in(self, header: bytearray | memoryview, limit: int) -> int:
        if self.handshake_end is not None and bytes(header[:3]) in _TLS:
            raise HandshakeRefused("the peer uses TLS, and this worker has no worker.access.tls")
        return body_length(header, limit)

    def fill(self, pieces: Sequence[memoryview]) -> None:
        """Reader thread: fill the pieces in order."""
        rest, at = list(pieces), 0
        while at < len(rest):
            if self._ahead:
                count = min(rest[at].nbytes, len(self._ahead))
                rest[at][:count], self._ahead = self._ahead[:count], self._ahead[count:]
            elif self._tls is not None and rest[at].nbytes < RECORD_BYTES:
                self._ahead = self._buffer[: self._receive_into(self._buffer)]
                continue
            elif self._tls is not None or self.handshake_end is not None:
                count = self._receive_into(rest[at])
            else:
                # Without MSG_WAITALL, each call returns as soon as some bytes have arrived.
                count = self.sock.recvmsg_into(rest[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise LinkClosed("the peer closed the link")
            at = _advance(rest, at, count)

    def _receive_into(self, view: memoryview) -> int:
        self._limit()
        count = self.stream.recv_into(view)
        if not count:
            raise LinkClosed("the peer closed the link")
        return count

    def _limit(self) -> None:
        # One deadline for the whole handshake, because with a timeout per call a peer that sends
        # single bytes could hold the link forever.
        if self.handshake_end is not None:
            left = self.handshake_end - time.monotonic()
            if left <= 0:
                raise LinkClosed("the handshake took too long")
            self.sock.settimeout(left)


def _advance(pieces: list[memoryview], at: int, count: int) -> int:
    while count:
        size = pieces[at].nbytes
        if count < size:
            pieces[at] = pieces[at][count:]
            return at
        count -= size
        at += 1
    return at
