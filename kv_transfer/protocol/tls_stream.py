"""The bytes of a TLS connection that one thread reads while another one writes.

OpenSSL allows one call at a time for a connection. So it works on buffers here, under a lock, and
the threads wait for the socket outside of it. A call of the system moves many records. Kernel TLS
would save the copies, but few kernels and builds of Python have it.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from typing import TYPE_CHECKING

from kv_transfer.errors import LinkClosed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

RECORD_BYTES = 16 << 10  # at most, by the protocol
# Encrypted, or received, at once: the other thread waits for less than a millisecond.
_BUFFER_BYTES = 256 << 10
# AES-GCM must not encrypt more than 2**24.5 records with one key (RFC 8446, 5.5), and Python cannot
# renew keys. A third of it leaves room for records that are not full, and for open transfers.
_MAX_RECORDS = 1 << 23


class TlsStream:
    """TLS over `sock`, which the caller closes, with the methods of a socket that a link uses."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._lock = threading.Lock()
        self._gathered = memoryview(bytearray(_BUFFER_BYTES))
        self._received = memoryview(bytearray(_BUFFER_BYTES))
        self._unsent = memoryview(b"")  # encrypted
        self._accepted = 0  # bytes of the caller that are in `_unsent`
        self._records = [0, 0]  # received, sent

    # -- begin and end, on one thread

    def begin(self, timeout_s: float) -> dict[str, Any]:
        """Do the handshake of TLS. Return the peer's certificate, as `ssl` decodes it. Raises
        OSError, which includes ssl.SSLError, and LinkClosed."""
        self._exchange(self._tls.do_handshake, timeout_s)
        return self._tls.getpeercert() or {}

    def end(self, timeout_s: float) -> bytes:
        """End TLS. What follows on the socket is plain; return what has arrived of it. Raises
        OSError and LinkClosed."""
        self._exchange(self._tls.unwrap, timeout_s)
        return self._incoming.read()

    def _exchange(self, step: Callable[[], object], timeout_s: float) -> None:
        """Repeat a step of both ends until it has succeeded."""
        end = time.monotonic() + timeout_s
        while True:
            try:
                step()
                return
            except ssl.SSLWantReadError:
                pass
            finally:  # after an error, the peer learns of it
                with contextlib.suppress(ConnectionError):
                    self._sock.sendall(self._outgoing.read())
            self._sock.settimeout(max(0.001, end - time.monotonic()))
            if not self._receive():
                raise LinkClosed("the peer closed the link before TLS")

    # -- traffic

    @property
    def is_worn(self) -> bool:
        """True if this connection must carry no more transfers."""
        return max(self._records) > _MAX_RECORDS

    @property
    def has_pending(self) -> bool:
        """True if received bytes wait for `recv_into`."""
        with self._lock:
            return bool(self._incoming.pending or self._tls.pending())

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes, at most those of one record. Return their number, 0 at the end."""
        while True:
            with self._lock, contextlib.suppress(ssl.SSLWantReadError):
                self._records[0] += 1
                return int(self._tls.read(view.nbytes, view))
            if not self._receive():
                return 0

    def _receive(self) -> int:
        count = self._sock.recv_into(self._received)
        with self._lock:
            self._incoming.write(self._received[:count])
        return count

    def sendmsg(self, pieces: Sequence[memoryview], flags: int = 0) -> int:
        """Send the first bytes of the pieces, and return their number. After a BlockingIOError, the
        next bytes to send must begin with the same ones."""
        if not self._unsent:
            data = pieces[0][:_BUFFER_BYTES]
            if data.nbytes < _BUFFER_BYTES and len(pieces) > 1:
                data = self._gather(pieces)
            with self._lock:
                self._accepted = self._tls.write(data)
                self._unsent = memoryview(self._outgoing.read())
            self._records[1] += -(-self._accepted // RECORD_BYTES)
        while self._unsent:
            self._unsent = self._unsent[self._sock.send(self._unsent, flags) :]
        return self._accepted

    def send(self, data: bytes, flags: int = 0) -> int:
        return self.sendmsg([memoryview(data)], flags)

    def _gather(self, pieces: Sequence[memoryview]) -> memoryview:
        size = 0
        for piece in pieces:
            part = piece[: _BUFFER_BYTES - size]
            self._gathered[size : size + len(part)] = part
            size += len(part)
            if size == _BUFFER_BYTES:
                break
        return self._gathered[:size]
