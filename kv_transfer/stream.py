"""A link's socket: messages and bytes in both directions. One thread reads, one at a time
writes."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

from kv_transfer.errors import LinkClosed
from kv_transfer.messages import (
    HEADER,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    Message,
    body_length,
    decode,
)

SOCKET_BUFFER_BYTES = 4 << 20
READ_AHEAD_BYTES = 4 << 10


class Stream:
    """Not connected before it has a socket. `handshake_end` is when the handshake must be over, on
    the monotonic clock; None once it is. Released by `close`."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.handshake_end: float | None = None
        self._read_ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._read_ahead[:0]

    def open(self, sock: socket.socket, send_s: float) -> None:
        """A peer that reads nothing for `send_s` ends what writes to it."""
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        limit = struct.pack("ll", int(send_s), int(send_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def shut(self) -> None:
        """Wakes whoever is blocked in the kernel, which `close` would not. Idempotent."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When no thread uses it any more. Idempotent."""
        if self.sock is not None:
            self.sock.close()

    def write(self, data: bytes) -> None:
        """All of it; waits for the peer."""
        sock = self._limited()
        try:
            sock.sendall(data)
        except BlockingIOError as error:
            raise LinkClosed("the peer reads nothing") from error

    def write_some(self, data: bytes) -> int:
        """How many bytes went without waiting."""
        if self.sock is None:
            raise LinkClosed("the link is not up")
        try:
            return self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def take(self, limit: int) -> memoryview:
        """So much of what was read ahead, or all there is; valid until the next `read`."""
        taken, self._ahead = self._ahead[:limit], self._ahead[limit:]
        return taken

    def fill(self, view: memoryview) -> None:
        """Waits for as many bytes as fit."""
        ahead = self.take(view.nbytes)
        view[: len(ahead)] = ahead
        view = view[len(ahead) :]
        while view.nbytes:
            view = view[self._receive_into(view) :]

    def can_read(self, timeout_s: float) -> bool:
        """Whether a byte comes within that time."""
        if self._ahead or self.sock is None:
            return True
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))

    def read(self) -> Message:
        """The next message."""
        if not self._ahead:
            # Most messages are short, and some come in pairs: one call for all of it.
            self._ahead = self._read_ahead[: self._receive_into(self._read_ahead)]
        limit = MAX_MESSAGE_BYTES if self.handshake_end is None else MAX_HANDSHAKE_BYTES
        ahead = self._ahead
        if len(ahead) >= HEADER.size:
            end = HEADER.size + body_length(ahead[: HEADER.size], limit)
            if end <= len(ahead):
                self._ahead = ahead[end:]
                return decode(ahead[HEADER.size : end])
        header = bytearray(HEADER.size)
        self.fill(memoryview(header))
        body = bytearray(body_length(header, limit))
        self.fill(memoryview(body))
        return decode(body)

    def _receive_into(self, view: memoryview) -> int:
        count = self._limited().recv_into(view)
        if not count:
            raise LinkClosed("the peer closed the link")
        return count

    def _limited(self) -> socket.socket:
        # The handshake as a whole has a deadline: a timeout a call would let a peer send one byte
        # after the other for ever.
        if self.sock is None:
            raise LinkClosed("the link is not up")
        if self.handshake_end is not None:
            left = self.handshake_end - time.monotonic()
            if left <= 0:
                raise LinkClosed("the handshake took too long")
            self.sock.settimeout(left)
        return self.sock
