"""The HTTP server on real sockets: framing, order, limits, backpressure, endings."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve import http_connection
from pdserve.http_cycle import AT_ONCE, TRY_WRITE
from pdserve.web_server import LIMITS, WebServer, bind
from tests.patience import WAIT_S, skip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.http_cycle import Message, Receive, Send

LARGE = b"x" * (16 << 20)


@dataclass
class Echo:
    """Answers with method, path and body; some paths do something else. Keeps what it saw."""

    scopes: list[Message] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        try:
            await self._answer(scope, receive, send)
        finally:
            self.ended.append(scope["path"])

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/fails":
                raise RuntimeError("on purpose")
            case "/breaks":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
                raise RuntimeError("on purpose")
            case "/unread":
                await _respond(send, b"no, thanks")
            case "/events":
                await self._events(scope, send)
            case "/flood":
                await self._flood(scope, send)
            case "/waits":
                await receive()
                while (await receive())["type"] != "http.disconnect":
                    pass
            case "/at_once":
                await self._at_once(scope, receive, send)
            case "/held":
                await self.release.wait()
                await _respond(send, b"held")
            case _:
                body = await _read(receive)
                text = f"{scope['method']} {scope['path']} ".encode() + body
                await _respond(send, text)

    async def _events(self, scope: Message, send: Send) -> None:
        write = scope["extensions"][TRY_WRITE]["between"](b"<%", b">")
        assert not write(b"before the head")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not write(b"before the first piece")
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        assert write(b"second ")
        await send({"type": "http.response.body", "body": b"last"})
        assert not write(b"after the end")

    async def _at_once(self, scope: Message, receive: Receive, send: Send) -> None:
        at_once = scope["extensions"][AT_ONCE]
        gone: list[bool] = []
        at_once["when_gone"](lambda: gone.append(True))
        body = at_once["whole_body"]()
        assert at_once["whole_body"]() is None, "it is read once"
        assert not gone
        if body is None:
            body = b"in pieces: " + await _read(receive)
        if body == b"leave":
            self.refused.set()
            while not gone:
                await receive()
            at_once["when_gone"](self.release.set)
            return
        await _respond(send, body)

    async def _flood(self, scope: Message, send: Send) -> None:
        write = scope["extensions"][TRY_WRITE]["between"](b"", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b".", "more_body": True})
        while write(LARGE[: 1 << 16]):
            pass
        self.refused.set()
        await send({"type": "http.response.body", "body": b"end", "more_body": True})
        await send({"type": "http.response.body"})


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _respond(send: Send, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: Echo) -> AsyncIterator[tuple[str, int]]:
    """Its address; in the end no connection and no task of it is left."""
    sock = bind("127.0.0.1", 0)
    host, port = sock.getsockname()
    server = WebServer(app, sock)
    await server.start()
    try:
        yield host, port
    finally:
        await server.stop()
        assert not server._connections
        assert not [t for t in asyncio.all_tasks() if t.get_name() == "http-request"]


@asynccontextmanager
async def connected(
    address: tuple[str, int],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(WAIT_S):
            yield reader, writer
    finally:
        writer.transport.abort()


def request(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: here", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


async def response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One response of a stated length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, body


async def test_one_connection_serves_requests_one_after_another() -> None:
    app = Echo()
    async with serving(app) as address, connected(address) as (reader, writer):
        for n in range(3):
            writer.write(request(f"/{n}", "content-length: 2", method="POST") + b"hi")
            status, headers, body = await response(reader)
            assert (status, body) == (200, f"POST /{n} hi".encode())
            assert "connection" not in headers
            assert headers["date"].endswith("GMT")


async def test_a_connection_leaves_nothing_to_the_collector() -> None:
    sock = bind("127.0.0.1", 0)
    server = WebServer(Echo(), sock)
    await server.start()
    gc.disable()
    try:
        async with connected(sock.getsockname()) as (reader, writer):
            writer.write(request("/"))
            await response(reader)
            (connection,) = map(weakref.ref, server._connections)
        await until(lambda: connection() is None)
    finally:
        gc.enable()
        await server.stop()


async def test_a_body_that_is_here_is_read_at_once() -> None:
    app = Echo()
    ask = request("/at_once", "content-length: 2", method="POST")
    async with serving(app) as address, connected(address) as (reader, writer):
        writer.write(ask + b"hi")
        assert (await response(reader))[2] == b"hi"
        writer.write(ask)
        await until(lambda: len(app.scopes) == 2)
        writer.write(b"ho")
        assert (await response(reader))[2] == b"in pieces: ho"


async def test_an_application_hears_of_it_when_its_client_leaves() -> None:
    app = Echo()
    async with serving(app) as address:
        async with connected(address) as (_, writer):
            writer.write(request("/at_once", "content-length: 5", method="POST") + b"leave")
            await app.refused.wait()
        async with asyncio.timeout(WAIT_S):
            # Who asks only now is told at once.
            await app.release.wait()
        await until(lambda: app.ended == ["/at_once"])


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    app = Echo()
    async with serving(app) as address, connected(address) as (reader, writer):
        writer.write(request("/held") + request("/a") + request("/b"))
        await until(lambda: app.scopes)
        assert [s["path"] for s in app.scopes] == ["/held"]
        app.release.set()
        bodies = [(await response(reader))[2] for _ in range(3)]
        assert bodies == [b"held", b"GET /a ", b"GET /b "]


async def test_more_requests_ahead_than_are_kept_all_get_their_answer() -> None:
    app = Echo()
    count = 10 * http_connection.MAX_PIPELINED
    async with serving(app) as address, connected(address) as (reader, writer):
        for n in range(count):
            writer.write(request(f"/{n}"))
        assert [(await response(reader))[2] for _ in range(count)] == [
            b"GET /%d " % n for n in range(count)
        ]


async def test_a_chunked_body_and_a_large_one_arrive_whole() -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/c", "transfer-encoding: chunked", method="POST"))
        for piece in (b"3\r\nabc\r\n", b"2\r\nde\r\n", b"0\r\n\r\n"):
            writer.write(piece)
            await writer.drain()
        assert (await response(reader))[2] == b"POST /c abcde"
        writer.write(request("/l", f"content-length: {len(LARGE)}", method="POST") + LARGE)
        assert (await response(reader))[2] == b"POST /l " + LARGE


async def test_who_expects_to_be_told_to_continue_is_told() -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/x", "content-length: 2", "expect: 100-continue", method="POST"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await response(reader))[2] == b"POST /x ok"


@pytest.mark.parametrize(
    ("version", "header"),
    [("1.0", "x: y"), ("1.0", "connection: keep-alive"), ("1.1", "connection: close")],
)
async def test_where_one_request_is_all_the_connection_ends(version: str, header: str) -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/one", header, version=version))
        status, headers, body = await response(reader)
        assert (status, headers["connection"], body) == (200, "close", b"GET /one ")
        assert await reader.read() == b""


async def test_a_stream_to_an_old_client_ends_with_its_connection() -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/breaks", version="1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"half"


async def test_a_head_request_gets_no_body() -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/first", method="HEAD") + request("/next"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200" in head
        assert b"content-length: 12" in head
        assert (await response(reader))[2] == b"GET /next "


async def test_pieces_written_at_once_and_the_usual_way_keep_their_order() -> None:
    async with (
        serving(Echo()) as (host, port),
        aiohttp.ClientSession() as session,
        session.get(f"http://{host}:{port}/events") as found,
    ):
        assert await found.read() == b"first <%second >last"


async def test_a_client_that_does_not_read_is_refused_what_it_cannot_take() -> None:
    app = Echo()
    async with serving(app) as address, connected(address) as (reader, writer):
        writer.write(request("/flood"))
        await asyncio.wait_for(app.refused.wait(), WAIT_S)
        assert app.ended == []
        assert (await _all(reader)).endswith(b"3\r\nend\r\n0\r\n\r\n")
    assert app.ended == ["/flood"]


async def _all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await reader.read(1 << 20)
    return data


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"GET /" + b"a" * http_connection.MAX_URL_BYTES, b"414"),
        (b"GET / HTTP/1.1\r\na: " + b"a" * http_connection.MAX_HEAD_BYTES, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (http_connection.MAX_HEADERS + 1) + b"\r\n", b"431"),
    ],
)
async def test_what_is_no_request_is_refused_and_the_connection_ended(
    data: bytes, status: bytes
) -> None:
    app = Echo()
    async with serving(app) as address, connected(address) as (reader, writer):
        writer.write(data)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in answer
    assert app.scopes == []


async def test_what_does_not_come_in_time_ends_the_connection() -> None:
    sock = bind("127.0.0.1", 0)
    server = WebServer(Echo(), sock)
    address = sock.getsockname()
    await server.start()
    async with connected(address) as (reader, writer):
        writer.write(b"GET / HT")
        await until(lambda: any(c._head_bytes for c in server._connections))
        skip(LIMITS.head_s)
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
    async with connected(address) as (reader, _):
        await until(lambda: server._connections)
        skip(LIMITS.head_s)
        assert await reader.read() == b""
    async with connected(address) as (reader, writer):
        writer.write(request("/once"))
        await response(reader)
        skip(LIMITS.idle_s)
        assert await reader.read() == b""
    async with connected(address) as (reader, writer):
        writer.write(request("/unread", "content-length: 10", method="POST") + b"123")
        assert (await response(reader))[2] == b"no, thanks"
        skip(LIMITS.head_s)
        assert await reader.read() == b""
    await server.stop()


async def test_a_failing_application_is_a_500_or_a_broken_stream() -> None:
    async with serving(Echo()) as address:
        async with connected(address) as (reader, writer):
            writer.write(request("/fails"))
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 500")
        async with connected(address) as (reader, writer):
            writer.write(request("/breaks"))
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readuntil(b"0\r\n\r\n")


async def test_a_client_that_leaves_is_noticed() -> None:
    app = Echo()
    async with serving(app) as address:
        async with connected(address) as (_, writer):
            writer.write(request("/waits"))
            await until(lambda: app.scopes)
        await until(lambda: app.ended)


async def test_a_request_to_speak_something_else_is_answered_as_http() -> None:
    async with serving(Echo()) as address, connected(address) as (reader, writer):
        writer.write(request("/u", "connection: upgrade", "upgrade: websocket"))
        status, headers, body = await response(reader)
        assert (status, headers["connection"], body) == (200, "close", b"GET /u ")


async def test_a_stop_ends_idle_connections_and_lets_a_response_end() -> None:
    app = Echo()
    sock = bind("127.0.0.1", 0)
    server = WebServer(app, sock)
    address = sock.getsockname()
    await server.start()
    async with connected(address) as (idle, _), connected(address) as (reader, writer):
        writer.write(request("/held"))
        await until(lambda: app.scopes)
        server.stop_listening()
        assert await idle.read() == b""
        with pytest.raises(OSError, match=r"refused|failed"):
            await asyncio.open_connection(*address)
        app.release.set()
        assert (await response(reader))[2] == b"held"
        assert await reader.read() == b""
    await server.stop()
    await server.stop()


async def test_a_stop_cuts_what_does_not_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("pdserve.web_server.STOP_TIMEOUT_S", 0.05)
    app = Echo()
    async with serving(app) as address, connected(address) as (_, writer):
        writer.write(request("/held"))
        await until(lambda: app.scopes)


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what it asks of says nothing when it changes
            await asyncio.sleep(0.005)
