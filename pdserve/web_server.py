"""An HTTP server for an ASGI application, inside an event loop that is not its own."""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.http_connection import ConnectionLimits, HttpConnection

if TYPE_CHECKING:
    import ssl

    from pdserve.http_cycle import App

BACKLOG = 2048
STOP_TIMEOUT_S = 5.0
TLS_HANDSHAKE_S = 15.0
TLS_SHUTDOWN_S = 5.0
LIMITS = ConnectionLimits()
# Files that are not for connections: gRPC's, models, logs.
_OTHER_FILES = 512


def bind(host: str, port: int, *, key: str = "http_port", is_shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError naming `key`, the port's. One
    that is shared is had by others of this user who share it too: the kernel gives each connection
    to one of those who listen (socket(7), SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY only where it reads IPPROTO_TCP, and without
    # it an answer's second packet waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", field=key
        ) from error
    return sock


def connections_within_reason(wanted: int) -> int:
    """How many connections this process can have, of `wanted`. Each is an open file: its limit of
    those is raised to what that takes, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, min(wanted, files - _OTHER_FILES))


class WebServer:
    """Serves `app` on `sockets`, which it closes. `stop` ends it with all its connections."""

    def __init__(
        self,
        app: App,
        *sockets: socket.socket,
        tls: ssl.SSLContext | None = None,
        max_connections: int = LIMITS.max_connections,
    ) -> None:
        self._limits = replace(LIMITS, max_connections=max_connections)
        self._app = app
        self._tls = tls
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []
        self._connections: set[HttpConnection] = set()
        self._nobody = asyncio.Event()

    async def start(self) -> None:
        """Returns when connections are taken."""
        loop = asyncio.get_running_loop()

        def connection() -> HttpConnection:
            return HttpConnection(self._app, self._connections, self._nobody.set, self._limits)

        for sock in self._sockets:
            server = await loop.create_server(
                connection,
                sock=sock,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else TLS_HANDSHAKE_S,
                ssl_shutdown_timeout=None if self._tls is None else TLS_SHUTDOWN_S,
            )
            self._servers.append(server)

    def stop_listening(self) -> None:
        """Take no more connections; those there are stay until their response is complete."""
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        for connection in list(self._connections):
            connection.close_when_idle()

    async def stop(self) -> None:
        """Idempotent; cuts what is still open after STOP_TIMEOUT_S."""
        self.stop_listening()
        if not await self._are_gone_within(STOP_TIMEOUT_S):
            for connection in list(self._connections):
                connection.abort()
            await self._are_gone_within(STOP_TIMEOUT_S)

    async def _are_gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._connections:
                    self._nobody.clear()
                    await self._nobody.wait()
        except TimeoutError:
            return False
        return True
