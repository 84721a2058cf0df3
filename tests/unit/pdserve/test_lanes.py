"""Lanes: tokens of a frame go to the sockets of their clients, in order, or are left to Python."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref
from contextlib import asynccontextmanager, contextmanager
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from pdserve import lanes
from pdserve.http_cycle import TRY_WRITE
from pdserve.lanes import pass_on
from pdserve.web_server import WebServer, bind
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from pdserve._lanes import Lane
    from pdserve.http_cycle import Message, Receive, Send

pytestmark = pytest.mark.skipif(
    lanes.compiled is None, reason="the extension was not built: no C compiler at install"
)
BEFORE, AFTER = b'data: {"t":', b"}\n\n"
GET = b"GET /%b HTTP/1.1\r\nhost: here\r\n\r\n"


class Streams:
    """Each request is a response that begins and then waits; the test writes to its lane."""

    def __init__(self) -> None:
        self.lanes: asyncio.Queue[Lane] = asyncio.Queue()
        self.end = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        make = scope["extensions"][TRY_WRITE]["lane"]
        early = make(BEFORE, AFTER)
        assert not early.takes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin", "more_body": True})
        lane = make(BEFORE, AFTER)
        lane.waits, lane.tokens = True, []
        self.lanes.put_nowait(lane)
        await self.end.wait()
        await send({"type": "http.response.body", "body": b"end"})
        assert not lane.takes


@asynccontextmanager
async def streaming() -> AsyncIterator[
    tuple[Streams, Callable[[], Awaitable[asyncio.StreamReader]]]
]:
    """The application, and a function that asks it and reads until the first chunk."""
    app, sock = Streams(), bind("127.0.0.1", 0)
    address = sock.getsockname()
    server = WebServer(app, sock)
    await server.start()
    writers = []

    async def ask() -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*address)
        writers.append(writer)
        writer.write(GET % b"stream")
        await reader.readuntil(b"5\r\nbegin\r\n")
        return reader

    try:
        async with asyncio.timeout(WAIT_S):
            yield app, ask
    finally:
        app.end.set()
        for writer in writers:
            writer.transport.abort()
        await server.stop()


async def chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def text_of(reader: asyncio.StreamReader) -> str:
    data = await chunk(reader)
    assert data.startswith(BEFORE)
    assert data.endswith(AFTER)
    return str(json.loads(data.removeprefix(b"data: "))["t"])


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_each_token_reaches_its_client_and_others_are_left(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with streaming() as (app, ask):
            first, second = await ask(), await ask()
            one, two = await app.lanes.get(), await app.lanes.get()
            given = ([7, 9, 8], [70, 90, 80], ['a\n"é', "nobody's", ""])
            assert list(pass_on({7: one, 8: two}, *given)) == [1]
            assert (one.tokens, two.tokens) == ([70], [80])  # without text there is no event
            assert list(pass_on({7: one, 8: two}, [8], [81], ["b"])) == []
            assert await text_of(first) == 'a\n"é'
            assert await text_of(second) == "b"
            app.end.set()
            assert await chunk(first) == b"end"

    run(scenario())


@pytest.mark.parametrize("state", ["takes", "waits"])
async def test_a_lane_that_is_not_ready_leaves_its_token(state: str) -> None:
    async with streaming() as (app, ask):
        await ask()
        lane = await app.lanes.get()
        setattr(lane, state, False)
        assert list(pass_on({1: lane}, [1], [5], ["a"])) == [0]
        setattr(lane, state, True)
        lane.tokens = None
        assert list(pass_on({1: lane}, [1], [5], ["a"])) == [0]


def test_the_transport_is_asked_again_whenever_others_may_have_written() -> None:
    ours, theirs = socket.socketpair()
    unsent = 0
    with ours, theirs:
        lane = lanes.compiled.Lane(ours.fileno(), lambda: unsent, lambda _: None, BEFORE, AFTER)

        def takes(text: str = "a") -> bool:
            return not list(pass_on({1: lane}, [1], [2], [text]))

        lane.takes = lane.waits = True
        lane.tokens = []
        assert takes()
        unsent = 1
        assert takes()  # nobody else writes between two tokens
        for attribute, value in (("waits", True), ("tokens", [])):
            unsent = 0
            assert takes()
            unsent = 1
            setattr(lane, attribute, value)
            assert not takes()
        unsent = 0
        assert takes()
        unsent = 1
        assert not takes("x" * 100_000)
        assert not takes()


async def test_what_a_client_does_not_read_waits_in_the_transport_and_comes_in_order() -> None:
    async with streaming() as (app, ask):
        reader = await ask()
        lane = await app.lanes.get()
        count = 0
        while not list(pass_on({1: lane}, [1], [count], ["x" * 1000 + str(count)])):
            count += 1
        # The last one that was taken did not fit, so that the next is left.
        assert lane.tokens == list(range(count))
        assert lane.takes
        assert [await text_of(reader) for _ in range(count)] == [
            "x" * 1000 + str(i) for i in range(count)
        ]


async def test_a_lane_of_a_connection_that_is_gone_takes_nothing() -> None:
    """Its descriptor may be another connection's by now."""
    async with streaming() as (app, ask):
        reader = await ask()
        lane = await app.lanes.get()
        reader._transport.abort()  # type: ignore[attr-defined]
        while lane.takes:  # noqa: ASYNC110 - nobody else is told
            await asyncio.sleep(0)
        assert list(pass_on({1: lane}, [1], [5], ["a"])) == [0]
        assert lane.tokens == []


@contextmanager
def lane_to() -> Iterator[tuple[socket.socket, Lane]]:
    """A lane, and the other end of its socket; what does not fit is an error."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(WAIT_S)
        lane = lanes.compiled.Lane(ours.fileno(), lambda: 0, lambda _: 1 / 0, BEFORE, AFTER)
        lane.takes = lane.waits = True
        lane.tokens = []
        yield theirs, lane


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_a_text_is_escaped_as_json_asks_for(text: str) -> None:
    with lane_to() as (theirs, lane):
        assert list(pass_on({1: lane}, [1], [2], [text])) == []
        body = BEFORE + encode_basestring(text).encode() + AFTER
        wanted = b"%x\r\n%b\r\n" % (len(body), body)
        assert theirs.recv(len(wanted), socket.MSG_WAITALL) == wanted


def test_what_is_too_long_for_it_is_left() -> None:
    with lane_to() as (_, lane):
        assert list(pass_on({1: lane}, [1], [2], ["x" * 100_000])) == [0]
        assert lane.tokens == []


def test_lists_of_different_lengths_are_refused_with_nothing_sent() -> None:
    with lane_to() as (_, lane):
        with pytest.raises(ValueError, match="as many"):
            pass_on({1: lane}, [1, 1], [2], ["a", "b"])
        assert lane.tokens == []


def test_a_lane_and_its_connection_are_collected() -> None:
    class Transport:
        def unsent(self) -> int:
            return 0

        def write(self, data: bytes) -> None:
            self.lane = data

    transport = Transport()
    lane = lanes.compiled.Lane(-1, transport.unsent, transport.write, BEFORE, AFTER)
    transport.lane = lane  # type: ignore[assignment]
    gone = weakref.ref(transport)
    del transport, lane
    gc.collect()
    assert gone() is None
