"""HTTP/1.1 server of routers and workers: aiohttp's low-level server with bounds on clients."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web, web_response

from pdserve.errors import ConfigError
from pdserve.net.sockets import detect_dead_peer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.web_protocol import RequestHandler

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)
_silent = logging.getLogger(f"{__name__}.aiohttp")
_silent.setLevel(logging.CRITICAL + 1)
# Replaces the header `Server`, in which aiohttp discloses its version and Python's. There is no
# setting for it.
web_response.SERVER_SOFTWARE = "pdserve"  # type: ignore[attr-defined]

BACKLOG = 2048
# Also bounds the time a client may take to send a request head.
KEEPALIVE_TIMEOUT_S = 75.0
# A client must read the end of a response within WRITE_TIMEOUT_S. A large body adds the time that
# its bytes take at MIN_BYTES_PER_S (half a megabit per second).
WRITE_TIMEOUT_S = 15.0
MIN_BYTES_PER_S = 64 << 10
STOP_TIMEOUT_S = 5.0
# The kernel closes a connection if the client's host has not answered for this many seconds, or if
# the client's receive buffer has been full that long. Its request then releases its slot.
DEAD_CLIENT_S = 12
TLS_HANDSHAKE_S = 15.0
# In bytes. Writing a larger body may block until the client reads.
_LARGE_BODY = 16 * 1024


def bind(host: str, port: int, *, key: str = "http.port", is_shared: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet.

    With `is_shared`, several processes of one user may bind the same port, and the kernel
    distributes connections among the listening ones (SO_REUSEPORT). Raises ConfigError naming `key`
    if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named. Without it the second packet of a
    # response waits up to 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        # Accepted sockets inherit these options.
        detect_dead_peer(sock, DEAD_CLIENT_S)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        is_http = error.errno == errno.EADDRINUSE and key == "http.port"
        hint = "; choose another with --http-port (`pdserve serve`: --port)" if is_http else ""
        text = f"cannot listen on {host} port {port}: {error.strerror or error}{hint}"
        raise ConfigError(text, field=key) from error
    return sock


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the hard limit: each connection uses one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class FileDownload(web.FileResponse):
    """Response with a file of `size` bytes. The client must read at least MIN_BYTES_PER_S."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, headers={"content-type": "application/octet-stream"})
        self._timeout_s = WRITE_TIMEOUT_S + size / MIN_BYTES_PER_S

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        async with _taken_within(self._timeout_s, request):
            return await super().prepare(request)


async def send_chunks(
    request: web.BaseRequest,
    response: web.StreamResponse,
    chunks: AsyncIterator[bytes],
    size: int,
) -> None:
    """Send `chunks` of `size` bytes together. The client must read at least MIN_BYTES_PER_S."""
    async with _taken_within(WRITE_TIMEOUT_S + size / MIN_BYTES_PER_S, request):
        # Get the first chunk before the headers are sent, so that an error can still be a response.
        first = await anext(chunks, b"")
        await response.prepare(request)
        await response.write(first)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()


@asynccontextmanager
async def _taken_within(seconds: float, request: web.BaseRequest) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client took the file too slowly") from None


class HttpServer:
    """Serves `handler` on `sockets` and closes them. If a client disconnects, its handler is
    cancelled. Construct and use it on one event loop."""

    def __init__(
        self,
        handler: Handler,
        *sockets: socket.socket,
        tls: ssl.SSLContext | None = None,
        max_body_bytes: int = 1 << 20,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
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
            # aiohttp logs requests that it cannot parse, which may contain an API key.
            logger=_silent,
            keepalive_timeout=keepalive_timeout_s,
            # A small compressed body could expand to any size.
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
            size = response.content_length or 0
            if protocol.writing_paused or size > _LARGE_BODY:
                # Send it here with a deadline: aiohttp would wait forever for a client that does
                # not read.
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S + size / MIN_BYTES_PER_S):
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

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Close every connection. Busy ones get `timeout_s` to finish. Idempotent."""
        self.stop_listening()
        await self._connections.shutdown(timeout_s)
