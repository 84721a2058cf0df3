"""A connection between two workers: its socket and what waits to be written on it.

One thread reads; one at a time writes (peers.py). Any thread may `post`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kv_transfer.errors import LinkClosed, ProtocolError
from kv_transfer.protocol.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    Message,
    body_length,
    decode,
    encode,
)
from pdserve.dead_peer import detect_dead_peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.layout import PagePart
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.protocol.producer import SendChunk

# Seconds without an answer of a producer's kernel after which a consumer gives up the link.
DEAD_PEER_S = 5
SOCKET_BUFFER_BYTES = 4 << 20
READ_AHEAD_BYTES = 4 << 10
_IOV_MAX = 512


class Channel:
    """A transport's end of one link."""

    name: str

    def told(self, body: bytes) -> None:
        """Handle an Inner message that came outside of `receive`. Must not block."""
        raise ProtocolError(f"{self.name} has no messages of its own")

    def close(self) -> None:
        """Release what the end holds."""


class ProducerChannel(Channel):
    """The sending end."""

    # Whether `send` neither copies nor waits, so that any thread may call it.
    is_quick = False

    def open(self) -> None:
        """Do what the first chunk should not wait for. On the link's writer thread, before all."""

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> None:
        """Announce the chunk and send the blocks, `part` of each page.

        It returns when the blocks may be overwritten. A transport whose consumer copies by itself
        returns at once: the digests prove that what was copied is what was computed.
        """
        raise NotImplementedError


class ConsumerChannel(Channel):
    """The receiving end."""

    # Whether `receive` starts to copy when the chunk is announced.
    is_pull = False

    def receive(
        self, chunk: ChunkReady, block_ids: list[int] | None, part: PagePart | None
    ) -> bytes:
        """Put the chunk into these blocks and return the digests of what was received. With None,
        discard it.

        Runs on the link's reader thread. When it returns or raises, nothing writes any more.
        """
        raise NotImplementedError


class Link:
    """`producer` or `consumer` is set when the handshake is over."""

    def __init__(self, address: str, *, is_dialled: bool) -> None:
        self.peer_address = address
        self.is_dialled = is_dialled
        self.opened_at = time.monotonic()
        self.peer_instance_id = ""
        self.producer: ProducerChannel | None = None
        self.consumer: ConsumerChannel | None = None
        self.reason = ""  # why it is down
        self.downgrade = ""  # if it uses a slower transport than it should: which, and why
        self.is_blamed = False  # the peer violated the protocol
        self.is_over = False  # down, and its threads have ended
        self.thread: threading.Thread | None = None
        self.handshake_end: float | None = None
        self._sock: socket.socket | None = None
        self._down = threading.Event()
        self._changed = threading.Condition()
        self.writing = threading.Lock()  # held by the thread that writes
        self._queue: deque[Message | SendChunk[Link]] = deque()
        self._unsent = b""
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]

    @property
    def transport(self) -> str:
        """Name of the negotiated transport; "" before the handshake is over."""
        channel = self.producer or self.consumer
        return "" if channel is None else channel.name

    @property
    def is_down(self) -> bool:
        return self._down.is_set()

    @property
    def peer(self) -> str:
        """Instance id of the other worker, or its address while that is unknown."""
        return self.peer_instance_id or self.peer_address

    # -- the socket's life

    @property
    def sock(self) -> socket.socket:
        if self._sock is None:
            raise LinkClosed("the link is not connected")
        return self._sock

    def open(self, sock: socket.socket, send_timeout_s: float) -> None:
        """Use a socket. A peer that reads nothing for `send_timeout_s` ends the link."""
        self._sock = sock
        # A producer's data may wait for a consumer that is busy; a consumer's messages never do.
        detect_dead_peer(sock, DEAD_PEER_S if self.is_dialled else int(send_timeout_s))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        limit = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self.is_down:
            raise LinkClosed(self.reason)

    def replace_socket(self, sock: socket.socket) -> None:
        """Continue on the same connection after TLS began or ended."""
        self._sock = sock

    def end_handshake(self) -> None:
        self.handshake_end = None
        self.sock.settimeout(None)

    def close(self, reason: str) -> bool:
        """End the link and wake its threads. Return False if it was down already."""
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

    def post(self, item: Message | SendChunk[Link]) -> None:
        """Queue a message or a chunk for the writer thread. Never blocks."""
        self.queue(item)
        self.wake_writer()

    def queue(self, item: Message | SendChunk[Link]) -> None:
        """Queue without waking the writer thread: `peers.flush` follows."""
        self._queue.append(item)

    def wake_writer(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for_items(self) -> bool:
        """Writer thread: return True when something is queued, False when the link is down."""
        with self._changed:
            while not (self._queue or self._unsent) and not self.is_down:
                self._changed.wait()
            return not self.is_down

    def take(self) -> Message | SendChunk[Link] | None:
        """Return the next queued item. The caller holds `writing`."""
        return self._queue.popleft() if self._queue and not self.is_down else None

    def put_back(self, item: Message | SendChunk[Link]) -> None:
        self._queue.appendleft(item)

    def write(self, message: Message) -> None:
        """Send a message, waiting for the peer. The caller holds `writing`."""
        self.write_pieces([memoryview(encode(message))])

    def write_some(self, message: Message) -> bool:
        """Send a message as far as the peer takes it without waiting. Return False if a rest is
        left, which precedes what is written next. The caller holds `writing`."""
        data = encode(message)
        try:
            sent = 0 if self._unsent else self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        self._unsent += data[sent:]
        return not self._unsent

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

    def say(self, message: Message) -> None:
        """Send a handshake message; TLS sockets have no scatter/gather calls."""
        self._limit()
        self.sock.sendall(encode(message))

    # -- reading

    def read(self) -> Message:
        """Reader thread: return the next message."""
        if not self._ahead:
            # Most messages are short and some come in pairs: one call for all of them.
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
            # MSG_WAITALL: otherwise a call returns as soon as some bytes are there.
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
        # One deadline for the whole handshake: with a timeout per call a peer could send one byte
        # after the other for ever.
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
