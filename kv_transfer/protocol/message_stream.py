"""Messages over a socket, plain or encrypted. One thread reads; one at a time writes."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kv_transfer.errors import HandshakeRefused, LinkClosed
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

SOCKET_BUFFER_BYTES = 4 << 20
READ_AHEAD_BYTES = RECORD_BYTES
_IOV_MAX = 512
# How TLS begins. As the length of a message, it exceeds the limit.
_TLS = (b"\x16\x03\x01", b"\x16\x03\x03")


class MessageStream:
    """Messages over `sock`, and the bytes between them. Released by `close`.

    `handshake_end`: deadline of the handshake on the monotonic clock. Methods that write need
    `writing`, which the thread that writes holds.
    """

    def __init__(self, sock: socket.socket, handshake_end: float) -> None:
        self.sock = sock
        self.writing = threading.Lock()
        self._handshake_end: float | None = handshake_end
        self._tls: TlsStream | None = None
        self._unsent = b""
        self._buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]
        self._unread: deque[KvMessage] = deque()

    def set_limits(self, dead_peer_s: int, send_timeout_s: float) -> None:
        """End the connection if the peer's kernel is silent for `dead_peer_s`, and a write if the
        peer reads nothing for `send_timeout_s`."""
        sock = self.sock
        detect_dead_peer(sock, dead_peer_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        limit = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def _bytes(self) -> socket.socket | TlsStream:
        return self._tls or self.sock

    def begin_tls(self, tls: TlsStream) -> None:
        self._tls = tls

    def end_handshake(self, timeout_s: float, *, keeps_tls: bool) -> None:
        """End TLS unless the link keeps it. Call it at both ends, and before the channels are set,
        because any thread may send then."""
        if self._tls is not None and not keeps_tls:
            self._ahead = memoryview(self._tls.end(timeout_s))
            self._tls = None
        self._handshake_end = None
        self.sock.settimeout(None)

    @property
    def is_worn(self) -> bool:
        """True if another link must replace this one, because its keys have encrypted enough."""
        return self._tls is not None and self._tls.is_worn

    def shut_down(self) -> None:
        """End the connection. Wakes a thread blocked in the kernel."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    # -- writing

    @property
    def has_unsent(self) -> bool:
        """True if buffered bytes are left to send."""
        return bool(self._unsent)

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
                sent = self._bytes.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[sent:]

    def write_pieces(self, pieces: Sequence[memoryview]) -> None:
        """Send all bytes of the pieces in order, without copying them if TLS is off. The
        caller holds `writing`."""
        unsent, self._unsent = self._unsent, b""
        rest, at = [memoryview(unsent), *pieces] if unsent else list(pieces), 0
        try:
            while at < len(rest):
                sent = self._bytes.sendmsg(rest[at : at + _IOV_MAX])
                at = _advance(rest, at, sent)
        except BlockingIOError as error:
            raise LinkClosed("the peer reads nothing") from error

    def send_handshake(self, message: KvMessage) -> None:
        self._limit()
        self.write(message)

    # -- reading

    def has_input(self, wait_s: float = 0.0) -> bool:
        """Reader thread: wait up to `wait_s`. Return True if bytes of the next message have
        arrived, or the stream has ended."""
        if self._unread or self._ahead or (self._tls is not None and self._tls.has_pending):
            return True
        arrived = select.poll()  # `select.select` takes no descriptor above 1023
        arrived.register(self.sock, select.POLLIN)
        return bool(arrived.poll(wait_s * 1000))

    @property
    def has_peer_closed(self) -> bool:
        """True if the peer has closed the socket, also while messages from before are unread."""
        closed = select.poll()
        closed.register(self.sock, select.POLLRDHUP)
        return bool(closed.poll(0))

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
        limit = MAX_MESSAGE_BYTES if self._handshake_end is None else MAX_HANDSHAKE_BYTES
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
        if self._handshake_end is not None and bytes(header[:3]) in _TLS:
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
            elif self._tls is not None or self._handshake_end is not None:
                count = self._receive_into(rest[at])
            else:
                # Without MSG_WAITALL, each call returns as soon as some bytes have arrived.
                count = self.sock.recvmsg_into(rest[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise LinkClosed("the peer closed the link")
            at = _advance(rest, at, count)

    def _receive_into(self, view: memoryview) -> int:
        self._limit()
        count = self._bytes.recv_into(view)
        if not count:
            raise LinkClosed("the peer closed the link")
        return count

    def _limit(self) -> None:
        # One deadline for the whole handshake, because with a timeout per call a peer that sends
        # single bytes could hold the link forever.
        if self._handshake_end is not None:
            left = self._handshake_end - time.monotonic()
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
