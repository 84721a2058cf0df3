"""Rendezvous of ranks: one listens, and accepts a connection from each rank that presents its
token."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pdserve.net.sockets import detect_dead_peer

if TYPE_CHECKING:
    from types import TracebackType

_JOIN_S = 30.0
_HELLO_S = 3.0  # a rank sends its hello as soon as it is connected
_DEAD_PEER_S = 10
_BACKLOG = 1024  # ranks may connect before the first one is accepted
_TOKEN_BYTES, _NUMBER_BYTES = 16, 2


@dataclass(frozen=True, slots=True)
class JoinPoint:
    """Where ranks connect, and the token by which the listener knows them."""

    host: str
    port: int
    token: bytes

    SIZE = _TOKEN_BYTES + _NUMBER_BYTES

    def to_bytes(self) -> bytes:
        """Return token and port, SIZE bytes: every rank knows the host."""
        return self.token + self.port.to_bytes(_NUMBER_BYTES)

    @classmethod
    def from_bytes(cls, host: str, data: bytes) -> JoinPoint:
        return cls(host, int.from_bytes(data[_TOKEN_BYTES:]), data[:_TOKEN_BYTES])

    def join(self, rank: int) -> socket.socket:
        """Connect as `rank`. Raises OSError."""
        link = socket.create_connection((self.host, self.port), _JOIN_S)
        link.sendall(self.token + rank.to_bytes(_NUMBER_BYTES))
        return _ready(link)


class JoinListener:
    """Accepts ranks at `point`, inside `with`."""

    def __init__(self, host: str) -> None:
        """Listen on `host`, an address of this host. Raises OSError."""
        family = socket.getaddrinfo(host, None)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        port, token = self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES)
        self.point = JoinPoint(host, port, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._listener.close()

    def accept(self, count: int) -> dict[int, socket.socket]:
        """Return the connections of `count` ranks, by rank. Raises OSError, TimeoutError after
        _JOIN_S."""
        links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _JOIN_S
        while len(links) < count:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            link, _ = self._listener.accept()
            link.settimeout(_HELLO_S)
            try:
                hello = link.recv(JoinPoint.SIZE, socket.MSG_WAITALL)
            except OSError:  # not a rank, such as a port scan: the ranks still connect
                hello = b""
            if secrets.compare_digest(hello[:_TOKEN_BYTES], self.point.token):
                links[int.from_bytes(hello[_TOKEN_BYTES:])] = _ready(link)
            else:
                link.close()
        return links


def _ready(link: socket.socket) -> socket.socket:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    detect_dead_peer(link, _DEAD_PEER_S)
    return link
