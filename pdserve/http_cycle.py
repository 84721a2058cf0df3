"""One request and its response, as ASGI (asgi.readthedocs.io, HTTP 2.x) has an application see it.

Beside ASGI there are ways more, each of which spares a coroutine or a task. The scope's extension
TRY_WRITE has `between(before, after)`, which makes a function of a piece of bytes. It writes the
piece, between the two, as a part of the response's body at once, or returns False where that would
wait; and `lane(before, after)`, which makes a lane of it, or None (pdserve/lanes.py). The extension
AT_ONCE has `whole_body()`, the body where all of it is here and None where `receive` has to be
asked, and `when_gone(callback)`, which calls back when the client leaves before its response is
complete, at once where it has left.
"""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from pdserve._lanes import Lane

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

TRY_WRITE = "pdserve.try_write"
AT_ONCE = "pdserve.at_once"
_BODILESS = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Wire(Protocol):
    """The connection as its exchanges see it."""

    is_paused: bool
    """Whether the client reads slower than is written."""

    def write(self, data: bytes) -> None:
        """Never waits; what cannot go yet is kept."""
        ...

    async def drained(self) -> None:
        """Returns when the client has caught up, or is gone."""
        ...

    def open_lane(self, before: bytes, after: bytes) -> Lane | None:
        """See pdserve/lanes.py."""
        ...

    def body_was_read(self) -> None:
        """The application has taken what was there of the body."""
        ...

    def response_completed(self) -> None:
        """The next request may be answered."""
        ...

    def break_off(self) -> None:
        """Ends the connection: what was begun cannot be completed."""
        ...


class Cycle:
    """State: how much of the request has come and been read, how much of the response has gone."""

    def __init__(self, app: App, wire: Wire, scope: Message, *, keep_alive: bool) -> None:
        self._app = app
        self._wire = wire
        self._scope = scope
        self._body: list[bytes] = []
        self._wake = asyncio.Event()
        self._is_read = False
        self._waits_for_continue = (b"expect", b"100-continue") in scope["headers"]
        self._head = b""  # of the response, until it goes with the first piece of the body
        self._chunked = False
        self._takes_pieces = False  # the head has gone, the end has not
        self._lane: Lane | None = None
        self._bodiless = scope["method"] == "HEAD"
        self.keep_alive = keep_alive
        self.request_complete = False
        self.response_started = False
        self.response_complete = False
        self.disconnected = False
        self._on_gone: Callable[[], None] | None = None
        scope["extensions"] = {
            TRY_WRITE: {"between": self._between, "lane": self._open_lane},
            AT_ONCE: {"whole_body": self._whole_body, "when_gone": self._when_gone},
        }

    async def run(self) -> None:
        """Runs the application; its failure is a 500, or a connection that breaks off."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("%s %s failed", self._scope["method"], self._scope["path"])
        finally:
            # They refer to this: without them nothing of a request waits for the collector.
            self._scope["extensions"].clear()
            self._on_gone = None
        if self.response_complete or self.disconnected:
            return
        if self.response_started:
            self._wire.break_off()
            return
        await self._send({"type": "http.response.start", "status": 500, "headers": []})
        await self._send({"type": "http.response.body"})

    # -- the request

    @property
    def unread_bytes(self) -> int:
        """Of the body, in memory."""
        return sum(map(len, self._body))

    def feed(self, piece: bytes) -> None:
        """Of the body; thrown away once nobody will read it."""
        if not self.response_complete:
            self._body.append(piece)
            self._wake.set()

    def end_request(self) -> None:
        """The whole body is here."""
        self.request_complete = True
        self._wake.set()

    def disconnect(self) -> None:
        """The client is gone."""
        self.disconnected = True
        self._take_pieces(False)
        self._wake.set()
        if self._on_gone is not None and not self.response_complete:
            self._on_gone()

    def _when_gone(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone
        if self.disconnected:
            on_gone()

    def _whole_body(self) -> bytes | None:
        if not self.request_complete or self._is_read or self.disconnected:
            return None
        body: bytes = self._take_body()["body"]
        return body

    async def _receive(self) -> Message:
        if self._waits_for_continue and not (self.response_started or self.request_complete):
            self._wire.write(_CONTINUE)
        self._waits_for_continue = False
        while not (self.disconnected or self.response_complete):
            if self._body or (self.request_complete and not self._is_read):
                return self._take_body()
            self._wake.clear()
            await self._wake.wait()
        return {"type": "http.disconnect"}

    def _take_body(self) -> Message:
        body = b"".join(self._body)
        self._body.clear()
        self._is_read = self.request_complete
        self._wire.body_was_read()
        return {"type": "http.request", "body": body, "more_body": not self._is_read}

    # -- the response

    def _between(self, before: bytes, after: bytes) -> Callable[[bytes], bool]:
        wire, fixed = self._wire, len(before) + len(after)
        write, template = wire.write, b"%%x\r\n%b%%b%b\r\n" % (_literal(before), _literal(after))

        def try_write(piece: bytes) -> bool:
            if not self._takes_pieces or wire.is_paused:
                return False
            write(template % (fixed + len(piece), piece))
            return True

        return try_write

    def _open_lane(self, before: bytes, after: bytes) -> Lane | None:
        self._lane = self._wire.open_lane(before, after)
        self._take_pieces(self._takes_pieces)
        return self._lane

    def _take_pieces(self, takes: bool) -> None:
        self._takes_pieces = takes
        if self._lane is not None:
            self._lane.takes = takes

    async def _send(self, message: Message) -> None:
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            self._head = self._make_head(message["status"], list(message.get("headers", ())))
            return
        self._write_body(message.get("body", b""), is_last=not message.get("more_body", False))
        if self._wire.is_paused and not self.response_complete:
            await self._wire.drained()

    def _write_body(self, body: bytes, *, is_last: bool) -> None:
        head, self._head = self._head, b""
        if self._bodiless:
            data = head
        elif self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data = head + chunk + (_LAST_CHUNK if is_last else b"")
        else:
            data = head + body
        if data:
            self._wire.write(data)
        self._take_pieces(self._chunked and not (is_last or self._bodiless))
        if is_last:
            self.response_complete = True
            self._body.clear()
            self._wake.set()
            self._wire.response_completed()

    def _make_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self._bodiless = self._bodiless or status in _BODILESS
        names = {name for name, _ in headers}
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        if b"content-length" not in names and not self._bodiless:
            if self._scope["http_version"] == "1.1":
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                # HTTP/1.0 knows no chunks: the end of the connection ends the body.
                self.keep_alive = False
        lines = [b"%b: %b\r\n" % item for item in headers]
        return b"%b%b%b\r\n" % (_status_line(status), _date_line(int(time.time())), b"".join(lines))


def _literal(data: bytes) -> bytes:
    return data.replace(b"%", b"%%")


@functools.cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode("ascii")


@functools.lru_cache(maxsize=1)
def _date_line(now: int) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")
