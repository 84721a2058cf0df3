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

from kv_transfer.errors import LinkClosed, ProtocolError
from kv_transfer.protocol.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    KvMessage,
    body_length,
    decode,
    encode,
)
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
READ_AHEAD_BYTES = 16 << 10
_IOV_MAX = 512


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

    def open(self) -> None:
        """Do slow preparations before the first chunk. Called first on the link's writer
        thread."""

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        """Announce the chunk and send the blocks, `part` of each page, or start to.

        The blocks may be overwritten when what is returned has ended. That of a transport whose
        consumer copies by itself has ended: if the blocks change under the copy, the digests do not
        match. Nothing is being sent if this raises.
        """
        raise NotImplementedError


class ConsumerChannel(Channel):
    """The receiving end."""

    # True if `receive` copies from the producer's memory when the chunk is announced. The producer
    # does not wait for it, and so may have announced the next chunks, too.
    is_pull = False

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        """Write the chunk into these blocks, or start to. With None, discard it. Digests other than
        those at the positions `checked` may be left out.

        Runs on the link's reader thread, which waits for what is returned, in order. No write is in
        progress if this raises.
        """
        raise NotImplementedError


class Sending(NamedTuple):
    """A chunk that is being sent. It began at `begun`, and has `size` bytes."""

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
        self.reason = ""  # why the link is down
        self.downgrade = ""  # the slower transport in use, and why; "" if none
        self.is_blamed = False  # the peer violated the protocol
        self.is_over = False  # down, and its threads have ended
        self.thread: threading.Thread | None = None
        self.handshake_end: float | None = None
        self._sock: socket.socket | None = None
        self._down = threading.Event()
        self._changed = threading.Condition()
        self.writing = threading.Lock()  # held by the thread that writes
        self._queue: deque[KvMessage | SendChunk[Link]] = deque()
        self.sending: deque[Sending] = deque()  # oldest first; of the writer thread
        self._unsent = b""
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]

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

    def replace_socket(self, sock: socket.socket) -> None:
        """Replace the socket object of the same connection, after TLS began or ended."""
        self._sock = sock

    def end_handshake(self) -> None:
        self.handshake_end = None
        self.sock.settimeout(None)

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

    def wait_for_items(self) -> bool:
        """Writer thread: return True when something is queued, False when the link is down."""
        with self._changed:
            while not (self.has_items or self.is_down):
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
        """Hold a message back until the next write or `send_buffered`. The caller holds
        `writing`."""
        self._unsent += encode(message)

    def send_buffered(self) -> None:
        """Send as much of what is held back as the socket accepts without blocking. The caller
        holds `writing`."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent, socket.MSG_DONTWAIT) :]

    def write_pieces(self, pieces: Sequence[memoryview]) -> None:
        """Send all bytes of the pieces in order, without copying them. The caller holds
        `writing`."""
        unsent, self._unsent = self._unsent, b""
        rest, at = [memoryview(unsent), *pieces] if unsent else list(pieces), 0
        try:
            while at < len(rest):
                sent = self.sock.sendmsg(rest[at : at + _IOV_MAX])
                at = _advance(rest, at, sent)
        except BlockingIOError as error:
            raise LinkClosed("the peer reads nothing") from error

    def send_handshake(self, message: KvMessage) -> None:
        """Send a handshake message; TLS sockets have no scatter/gather calls."""
        self._limit()
        self.sock.sendall(encode(message))

    # -- reading

    def has_input(self, wait_s: float = 0.0) -> bool:
        """Reader thread: return True if bytes of the next message are here, or the link has ended.
        Waits for that so long."""
        if self._ahead:
            return True
        arrived = select.poll()  # `select.select` takes no descriptor above 1023
        arrived.register(self.sock, select.POLLIN)
        return bool(arrived.poll(wait_s * 1000))

    def read(self) -> KvMessage:
        """Reader thread: return the next message."""
        if not self._ahead:
            # Most messages are short and some come in pairs: read them all with one system call.
            self._ahead = self._buffer[: self._receive_into(self._buffer)]
        limit = MAX_MESSAGE_BYTES if self.handshake_end is None else MAX_HANDSHAKE_BYTES
        ahead = self._ahead
        if len(ahead) >= HEADER.size:
            end = HEADER.size + body_length(ahead[: HEADER.size], limit)
            if end <= len(ahead):
                self._ahead = ahead[end:]
                return decode(ahead[HEADER.size : end])
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)])
        body = bytearray(body_length(header, limit))
        self.fill([memoryview(body)])
        return decode(body)

    def fill(self, pieces: Sequence[memoryview]) -> None:
        """Reader thread: fill the pieces in order."""
        rest, at = list(pieces), 0
        while at < len(rest) and self._ahead:
            count = min(rest[at].nbytes, len(self._ahead))
            rest[at][:count], self._ahead = self._ahead[:count], self._ahead[count:]
            at = _advance(rest, at, count)
        while at < len(rest):
            if self.handshake_end is not None:
                at = _advance(rest, at, self._receive_into(rest[at]))
                continue
            # Without MSG_WAITALL, each call returns as soon as some bytes have arrived.
            count = self.sock.recvmsg_into(rest[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
            if not count:
                raise LinkClosed("the peer closed the link")
            at = _advance(rest, at, count)

    def _receive_into(self, view: memoryview) -> int:
        self._limit()
        count = self.sock.recv_into(view)
        if not count:
            raise LinkClosed("the peer closed the link")
        return count

    def _limit(self) -> None:
        # One deadline for the whole handshake: with a timeout per call, a peer that sends single
        # bytes could hold the link for ever.
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
