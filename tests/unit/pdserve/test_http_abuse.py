"""Clients that mean ill, or do not know better: each costs a bounded buffer and a bounded time."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from pdserve.http_connection import MAX_HEAD_BYTES
from pdserve.web_server import LIMITS, WebServer, bind, connections_within_reason
from tests.patience import WAIT_S, skip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.http_connection import HttpConnection
    from pdserve.http_cycle import Message, Receive, Send

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
LARGE = b"x" * (1 << 18)
MANY = 2000


class Answers:
    """Says the same to everyone, without reading what they say. State: how often."""

    def __init__(self, body: bytes = b"fine") -> None:
        self.count = 0
        self._body = body

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.count += 1
        length = (b"content-length", b"%d" % len(self._body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": self._body})


@asynccontextmanager
async def serving(
    app: Answers, *, max_connections: int = MANY + 10
) -> AsyncIterator[tuple[WebServer, tuple[str, int]]]:
    sock = bind("127.0.0.1", 0)
    server = WebServer(app, sock, max_connections=max_connections)
    await server.start()
    try:
        yield server, sock.getsockname()
    finally:
        await server.stop()
        assert not server._connections


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(WAIT_S):
            yield reader, writer
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what it asks of says nothing when it changes
            await asyncio.sleep(0.005)


def only(server: WebServer) -> HttpConnection:
    (connection,) = server._connections
    return connection


async def test_who_asks_and_asks_and_reads_nothing_is_held_and_then_cut() -> None:
    app = Answers(LARGE)
    async with serving(app) as (server, address), connected(address) as (_, writer):
        for _ in range(200):
            writer.write(GET)
        await until(lambda: server._connections and only(server)._is_held)
        seen = app.count
        # A few answers, one more than the socket and the transport take; not two hundred.
        assert seen * len(LARGE) < 32 << 20
        assert only(server)._transport.get_write_buffer_size() <= 2 * len(LARGE)
        assert len(only(server)._cycles) <= 200
        skip(LIMITS.idle_s)
        await until(lambda: not server._connections)
        assert app.count == seen


async def test_who_reads_late_gets_every_answer() -> None:
    app = Answers(LARGE)
    async with serving(app) as (server, address), connected(address) as (reader, writer):
        for _ in range(40):
            writer.write(GET)
        await until(lambda: server._connections and only(server)._is_held)
        found = b""
        while found.count(b"HTTP/1.1 200") < 40 or not found.endswith(LARGE):
            found += await reader.read(1 << 20)
        assert app.count == 40


async def test_who_leaves_its_last_answer_unread_is_cut() -> None:
    app = Answers(b"x" * (64 << 20))
    async with serving(app) as (server, address), connected(address) as (_, writer):
        writer.write(GET.replace(b"host: here", b"connection: close"))
        await until(lambda: app.count)
        await until(only(server)._transport.is_closing)
        # The first time something may have gone since.
        while server._connections:
            skip(LIMITS.idle_s)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"trailer: x\r\n" * 100, b"0\r\ntrailer: " + b"x" * 1000, b"1;" + b"x" * 1000],
)
async def test_framing_without_a_body_in_it_has_an_end(endless: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(Answers()) as (server, address), connected(address) as (_, writer):
        writer.write(head + endless)
        sent, more = 0, endless.rpartition(b"\n")[2] or b"trailer: x\r\n"
        while server._connections or not sent:
            writer.write(more)
            sent += len(more)
            await asyncio.sleep(0)
            assert sent < 64 * MAX_HEAD_BYTES
            if sent > 8 * MAX_HEAD_BYTES:
                await asyncio.sleep(0.01)


async def test_one_connection_too_many_is_told_so_and_no_other_is_hurt() -> None:
    async with AsyncExitStack() as exits:
        _, address = await exits.enter_async_context(serving(Answers(), max_connections=2))
        first, _second = [await exits.enter_async_context(connected(address)) for _ in range(2)]
        first[1].write(GET)
        assert await first[0].readuntil(b"fine")
        async with connected(address) as (reader, _):
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
        first[1].write(GET)
        assert await first[0].readuntil(b"fine")


async def test_two_thousand_idle_connections_hurt_nobody() -> None:
    connections_within_reason(2 * MANY)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * MANY + 512:
        pytest.skip("the limit of open files is too low for both ends of 2,000 connections")
    async with AsyncExitStack() as exits:
        server, address = await exits.enter_async_context(serving(Answers()))
        loop = asyncio.get_running_loop()
        idle = [exits.enter_context(socket.socket()) for _ in range(MANY)]
        for one in idle:
            one.setblocking(False)
            await loop.sock_connect(one, address)
        await until(lambda: len(server._connections) == MANY)
        async with connected(address) as (reader, writer):
            writer.write(GET)
            assert await reader.readuntil(b"fine")


def test_connections_are_as_many_as_files_allow() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert connections_within_reason(10) == 10
        if before[1] != resource.RLIM_INFINITY:
            assert connections_within_reason(1 << 40) < before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
