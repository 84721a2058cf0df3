"""One client's HTTP/1.1 connection (RFC 9112): requests parsed by httptools, answered in order by
an ASGI application, everything bounded in bytes and time.

Written for streams of small events: a write costs one call on the transport and no task. What the
protocol cannot say over this connection any more (a request that is no HTTP, too large a head)
ends it with a short answer of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools

from pdserve import lanes
from pdserve.http_cycle import Cycle

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve._lanes import Lane
    from pdserve.http_cycle import App

MAX_HEAD_BYTES = 64 * 1024
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 128
# Of a body that waits for the application; and of requests that wait for their turn.
MAX_UNREAD_BYTES = 256 * 1024
MAX_PIPELINED = 8
_REFUSAL = (
    b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`head_s` from a request's first byte to the end of its head, and from a response's end to
    that of a body that nobody reads; `idle_s` between requests, and for a client that has requests
    answered and takes none of it; `max_connections` at one time, those that are refused included.
    """

    head_s: float = 20.0
    idle_s: float = 75.0
    max_connections: int = 16_384


class HttpConnection(asyncio.Protocol):
    """State: the requests that are parsed and not answered, the first of them being answered, or
    held while the client takes no answers; what the connection waits for, and what was unsent then;
    whether its end was decided."""

    def __init__(
        self,
        app: App,
        connections: set[HttpConnection],
        on_gone: Callable[[], None],
        limits: ConnectionLimits,
    ) -> None:
        self._app = app
        self._connections = connections
        self._on_gone = on_gone
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._cycles: deque[Cycle] = deque()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = math.inf
        self._drained = asyncio.Event()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._head_bytes = 0
        self._framing_bytes = 0  # of a body, since the last of its own bytes
        self._unsent = 0
        self._is_held = False
        self._parses = True
        self._reads = True
        self._closing = False
        self.is_paused = False
        self._transport: asyncio.Transport
        self._scheme: str

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.write: Callable[[bytes], None] = self._transport.write
        is_one_too_many = len(self._connections) >= self._limits.max_connections
        self._connections.add(self)
        self._wait(self._limits.head_s)
        if is_one_too_many:
            self._refuse(b"503 Service Unavailable", b"there are too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        self._set_timer()
        for cycle in self._cycles:
            cycle.disconnect()
        self._closing = True
        self._drained.set()
        if self._task is None or self._task.done():
            self._leave()
        else:
            # The application learns of it by its next message; until then it is running here.
            self._task.add_done_callback(self._leave)

    def data_received(self, data: bytes) -> None:
        if not self._parses:
            return
        begins = not (self._head_bytes or self._cycles)
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing else than HTTP/1.1 is spoken; this request is answered as such.
            self._parses = False
            self._cycles[-1].keep_alive = False
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"the request is not HTTP/1.1")
        if len(self._url) > MAX_URL_BYTES:
            self._refuse(b"414 URI Too Long", b"the request's target is too long")
        if (self._in_head and self._head_bytes > MAX_HEAD_BYTES) or (
            self._framing_bytes > MAX_HEAD_BYTES
        ):
            self._refuse(b"431 Request Header Fields Too Large", b"the head is too large")
        if begins and self._head_bytes and self._parses:
            self._wait(self._limits.head_s)  # no timer for a head that came whole
        self._flow()

    def pause_writing(self) -> None:
        self.is_paused = True
        self._drained.clear()

    def resume_writing(self) -> None:
        self.is_paused = False
        self._drained.set()
        if self._is_held and self._cycles:
            self._answer(self._cycles[0])

    # -- httptools

    def on_message_begin(self) -> None:
        self._url, self._headers, self._in_head = b"", [], True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which nobody asked for
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._framing_bytes = False, 0, 0
        if len(self._headers) > MAX_HEADERS:
            self._refuse(b"431 Request Header Fields Too Large", b"there are too many headers")
        if not self._parses:
            return
        url = httptools.parse_url(self._url)
        path = (url.path or b"/").decode("ascii", "replace")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": unquote(path),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
        }
        # HTTP/1.0's keep-alive is left alone: it has to be agreed on by headers.
        keeps = scope["http_version"] == "1.1" and self._parser.should_keep_alive()
        cycle = Cycle(self._app, self, scope, keep_alive=keeps)
        self._cycles.append(cycle)
        if len(self._cycles) == 1:
            self._answer(cycle)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self._parses:
            self._cycles[-1].feed(body)

    def on_message_complete(self) -> None:
        self._in_head, self._framing_bytes = True, 0
        if not self._parses:
            return
        cycle = self._cycles[-1]
        cycle.end_request()
        if not cycle.keep_alive:
            self._parses = False
        if cycle.response_complete:
            self._next()

    # -- Wire, for the cycles; `write` is the transport's

    async def drained(self) -> None:
        await self._drained.wait()

    def open_lane(self, before: bytes, after: bytes) -> Lane | None:
        return lanes.open_lane(self._transport, before, after)

    def body_was_read(self) -> None:
        self._flow()

    def response_completed(self) -> None:
        cycle = self._cycles[0]
        if not cycle.keep_alive or self._closing:
            self._end()
        elif cycle.request_complete:
            self._next()
        else:
            self._wait(self._limits.head_s)
            self._flow()

    def break_off(self) -> None:
        self._transport.abort()

    # -- ending

    def close_when_idle(self) -> None:
        """Ends the connection at the end of the response that it is sending, if any."""
        self._closing = True
        if not self._cycles:
            self._transport.close()
        else:
            self._cycles[0].keep_alive = False

    def abort(self) -> None:
        """Ends it now, and its application."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    # -- inside

    def _answer(self, cycle: Cycle) -> None:
        """Not before the client has taken what was answered: else it could fill the memory with
        answers that it does not read."""
        self._is_held = self.is_paused
        if self._is_held:
            self._wait(self._limits.idle_s)
            return
        self._wait(None)
        self._task = self._loop.create_task(cycle.run(), name="http-request")

    def _next(self) -> None:
        self._cycles.popleft()
        if self._closing:
            self._end()
        elif self._cycles:
            self._answer(self._cycles[0])
        else:
            self._wait(self._limits.idle_s)
        self._flow()

    def _leave(self, _: object = None) -> None:
        self._parser = self._task = None  # they know the connection
        self._connections.discard(self)
        self._on_gone()

    def _end(self) -> None:
        self._parses = False
        self._wait(self._limits.idle_s)  # for what is still to be sent
        self._transport.close()

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """The connection cannot go on: says why where nothing else is being said."""
        if not self._parses:
            return
        self._parses = False
        if self._cycles:
            self._cycles[-1].keep_alive = False
            if not self._cycles[-1].request_complete:
                self._cycles[-1].disconnect()
                self._transport.close()
            return
        self._transport.write(_REFUSAL % (status, len(reason) + 1, reason + b"\n"))
        self._end()

    def _flow(self) -> None:
        """Reads from the client while there is room for what comes."""
        unread = self._cycles[-1].unread_bytes if self._cycles else 0
        reads = unread < MAX_UNREAD_BYTES and len(self._cycles) <= MAX_PIPELINED
        if reads != self._reads and not self._transport.is_closing():
            self._reads = reads
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def _wait(self, seconds: float | None) -> None:
        """Until something else is decided, the connection may stay as it is for `seconds`."""
        if seconds is None:
            self._until = math.inf
            return
        self._unsent = self._transport.get_write_buffer_size()
        self._until = self._loop.time() + seconds
        # One that is too early is set anew when it comes, for most waits end before that.
        if self._timer is None or self._timer.when() > self._until:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._until < math.inf:
            self._timer = self._loop.call_at(self._until, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() < self._until:
            self._set_timer()
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self._in_head and self._head_bytes and not self._cycles:
            self._refuse(b"408 Request Timeout", b"the head did not come in time")
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent < self._unsent:
            self._wait(self._limits.idle_s)  # slow, but it does take it
        elif unsent:
            self._transport.abort()
        else:
            self._transport.close()
