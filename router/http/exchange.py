"""One HTTP exchange over ASGI: the request's headers and bounded body, the response, and who may
cut it short."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    PdserveError,
    RequestTooLarge,
)
from pdserve.http_cycle import AT_ONCE, TRY_WRITE
from router.http.errors import error_body, error_headers
from router.http.sse import error_event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from pdserve._lanes import Lane
    from router.http.errors import Headers

    Message = MutableMapping[str, Any]
    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    SenderBetween = Callable[[bytes, bytes], Callable[[bytes], bool]]
    LaneBetween = Callable[[bytes, bytes], Lane | None]

BODY_TIMEOUT_S = 30.0
LINGER_S = 10.0

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of nginx's kind hold answers back without this.
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """State: whether the response has begun, and whether it is complete."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._receive = receive
        self._send = send
        extensions = scope.get("extensions", {})
        extension = extensions.get(TRY_WRITE)
        self._at_once: Mapping[str, Callable[..., Any]] = extensions.get(AT_ONCE, {})
        # Makes what sends a piece of the events at once, or says that it would wait; None where the
        # server knows no such way. For events that follow others.
        self.between: SenderBetween | None = extension and extension["between"]
        self.lane: LaneBetween | None = extension and extension["lane"]
        self._extra: Headers = []
        self._started = False
        self._complete = False
        self.tenant = ""  # who asks, once that is known

    def header(self, name: bytes) -> str | None:
        """The first header of this name, in lower case as ASGI gives them."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def add_header(self, name: bytes, value: str) -> None:
        """Say this with whatever response follows."""
        self._extra.append((name, value.encode("latin-1")))

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body, of which never more than `max_bytes` and one piece are held.

        Raises RequestTooLarge, DeadlineExceeded for a body that trickles in, InvalidRequest for an
        encoded one and Cancelled where the client goes away.
        """
        if self.header(b"content-encoding") not in (None, "identity"):
            raise InvalidRequest("encoded bodies are not read", field="content-encoding")
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        whole_body = self._at_once.get("whole_body")
        if whole_body is not None and (whole := whole_body()) is not None:
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            return bytes(whole)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client went away")
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > max_bytes:
                        raise _too_large(max_bytes)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    def when_gone(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client leaves before its response is complete."""
        when_gone = self._at_once.get("when_gone")
        if when_gone is not None:
            when_gone(on_gone)

    async def respond(
        self, status: int, body: bytes, *, content_type: bytes = b"application/json"
    ) -> None:
        """A whole response."""
        await self._begin(status, [*_whole(body, content_type), *self._extra])
        await self._end(body)

    async def start_events(self) -> None:
        """200, and events from here on."""
        await self._begin(200, [*_EVENT_STREAM, *self._extra])

    async def send_events(self, events: bytes) -> None:
        """Waits while the client reads slower than this is called."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        """The last of them."""
        await self._end(events)

    async def fail(self, error: PdserveError) -> None:
        """A clean status before the response has begun, an event after it, nothing once all was
        said."""
        if self._complete:
            return
        if self._started:
            await self._end(error_event(error))
            return
        self._extra += error_headers(error)
        if isinstance(error, RequestTooLarge):
            await self._respond_unread(error)
        else:
            await self.respond(error.http_status, error_body(error))

    async def _respond_unread(self, error: PdserveError) -> None:
        """Answer, then throw away what the client is still sending: a connection that is closed
        with bytes unread is reset, and takes the answer with it."""
        body = error_body(error)
        headers = [*_whole(body, b"application/json"), *self._extra, (b"connection", b"close")]
        await self._begin(error.http_status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if self.header(b"expect") is None:
            await self._discard_body()
        await self._end(b"")

    async def _discard_body(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass
        except TimeoutError:
            return

    async def _begin(self, status: int, headers: Headers) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end(self, body: bytes) -> None:
        self._complete = True
        await self._send({"type": "http.response.body", "body": body})


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes")


def _whole(body: bytes, content_type: bytes) -> Headers:
    return [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
