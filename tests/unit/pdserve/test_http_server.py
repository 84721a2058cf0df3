"""HTTP server: limits on clients, TLS-independent; the protocol itself is aiohttp's."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pdserve.net import http_server
from pdserve.net.http_server import HttpServer, bind
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.http_server import Handler

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: here\r\n\r\n"


class Service:
    """Handlers of a test: `go_on` ends /slow, `cancelled` is set if its client leaves."""

    def __init__(self) -> None:
        self.count = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.count += 1
        if request.path == "/slow":
            self.started.set()
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return web.Response(text="fine")


@asynccontextmanager
async def serving(
    handle: Handler | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Service, HttpServer, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    service = Service()
    server = HttpServer(handle or service.handle, sock, **settings)
    await server.start()
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(WAIT_S):
            yield service, server, (reader, writer)
    finally:
        writer.transport.abort()
        await server.stop()
        assert not server.open_connections


async def test_one_connection_serves_requests_one_after_another() -> None:
    async with serving() as (service, _, (reader, writer)):
        for _ in range(3):
            writer.write(GET)
            assert b" 200 " in await reader.readuntil(b"fine")
        writer.write(GET * 3)
        for _ in range(3):
            await reader.readuntil(b"fine")
        assert service.count == 6


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\na: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
async def test_an_invalid_or_oversized_request_head_is_refused(request_head: bytes) -> None:
    async with serving() as (service, _, (reader, writer)):
        writer.write(request_head)
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        assert not service.count


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET])
async def test_silent_client_is_disconnected(sent: bytes) -> None:
    async with serving(keepalive_timeout_s=0.05) as (_, _, (reader, writer)):
        writer.write(sent)
        await reader.read()


async def test_the_kernel_closes_a_connection_whose_client_vanished() -> None:
    """tests/slow/test_network.py shows that it does."""
    found: list[tuple[int, int]] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        sock = request.transport.get_extra_info("socket")
        timeout_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        probes_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + sock.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
        ) * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found.append((timeout_ms, probes_s))
        return web.Response(text="fine")

    async with serving(handle) as (_, _, (reader, writer)):
        writer.write(GET)
        await reader.readuntil(b"fine")
    assert found == [(1000 * http_server.DEAD_CLIENT_S, http_server.DEAD_CLIENT_S)]


async def test_stop_closes_idle_connections_and_lets_a_response_end() -> None:
    async with serving() as (service, server, (reader, writer)):
        idle, idle_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        idle_writer.write(GET)
        await idle.readuntil(b"fine")
        writer.write(SLOW)
        await service.started.wait()
        server.stop_listening()
        assert await idle.read() == b""
        idle_writer.close()
        service.go_on.set()
        answer = await reader.read()
        assert answer.endswith(b"fine")
        assert b"Connection: close" in answer


async def test_stop_aborts_responses_that_do_not_end() -> None:
    async with serving() as (service, server, (reader, writer)):
        writer.write(SLOW)
        await service.started.wait()
        await server.stop(timeout_s=0.05)
        assert await reader.read() == b""
