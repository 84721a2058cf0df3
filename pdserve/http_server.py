"""HTTP/1.1 server of routers and workers: aiohttp's low-level server with bounds on clients."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from aiohttp.web_protocol import RequestHandler

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)
_silent = logging.getLogger(f"{__name__}.aiohttp")
_silent.setLevel(logging.CRITICAL + 1)

BACKLOG = 2048
# Also bounds the time a client may take to send a request head.
KEEPALIVE_TIMEOUT_S = 75.0
# For the client to take the last bytes of a response.
WRITE_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
TLS_HANDSHAKE_S = 15.0
# Larger bodies may have to wait for the client.
_LARGE_BODY = 16 * 1024


def bind(host: str, port: int, *, key: str = "http_port", is_shared: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet.

    With `is_shared`, several processes of one user may bind the same port, and the kernel spreads
    connections over those that listen (SO_REUSEPORT). Raises ConfigError naming `key` if the
    address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named. Without it the second packet of a
    # response waits up to 40 ms for the client's delayed acknowledgement.
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


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpServer:
    """Serves `handler` on `sockets` and closes them. A client that leaves cancels its handler.
    Made and used on one event loop."""

    def __init__(
        self,
        handler: Handler,
        *sockets: socket.socket,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = 1 << 20,
    ) -> None:
        self._handler = handler
        self._sockets = sockets
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._busy: set[RequestHandler] = set()
        self._stopping = False
        loop = asyncio.get_running_loop()
        self._connections = web.Server(
            self._handle,
            request_factory=partial(web.BaseRequest, loop=loop, client_max_size=max_body_bytes),
            handler_cancellation=True,
            access_log=None,
            # aiohttp logs what it could not parse, which may hold an API key.
            logger=_silent,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            auto_decompress=False,
        )

    @property
    def open_connections(self) -> int:
        return len(self._connections.connections)

    async def start(self) -> None:
        """Accept connections. Returns when the sockets listen."""
        for sock in self._sockets:
            server = await asyncio.get_running_loop().create_server(
                self._connections,
                sock=sock,
                backlog=BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else TLS_HANDSHAKE_S,
            )
            self._servers.append(server)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        protocol = request.protocol
        if protocol.writing_paused:
            # The client pipelines requests and does not read the responses.
            protocol.force_close()
        self._busy.add(protocol)
        try:
            try:
                response = await self._handler(request)
            except Exception:
                logger.exception("%s %s", request.method, request.path)
                response = web.Response(status=500)
            if self._stopping and not response.prepared:
                response.force_close()
            if protocol.writing_paused or (response.content_length or 0) > _LARGE_BODY:
                # aiohttp would wait without end for a client that does not read.
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.prepare(request)
                        await response.write_eof()
                except TimeoutError:
                    if request.transport is not None:
                        request.transport.abort()
            return response
        finally:
            self._busy.discard(protocol)

    def stop_listening(self) -> None:
        """Accept no more connections. Open ones are closed after the response they are sending."""
        self._stopping = True
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        for protocol in self._connections.connections:
            if protocol in self._busy:
                protocol.close()
            else:
                protocol.force_close()

    async def stop(self) -> None:
        """Close every connection, those still busy after STOP_TIMEOUT_S too. Idempotent."""
        self.stop_listening()
        await self._connections.shutdown(STOP_TIMEOUT_S)
