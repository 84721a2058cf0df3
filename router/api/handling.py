"""Shared parts of the HTTP handlers: paths, a request's tenant and body, JSON responses, and the
sinks of answers: an event stream, or one body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.http_writer import StreamWriter

from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    UnsupportedMediaType,
)
from router.api.dialects.fields import encode
from router.api.preprocess import check_request_id, new_request_id

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pdserve.errors import PdserveError
    from router.api.dialects.fields import Writer
    from router.request.answer import AnswerDelta

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Called with the request and the names in its path."""

BODY_TIMEOUT_S = 30.0
_JSON = "application/json"
HEADERS = web.RequestKey("response_headers", dict[str, str])
TENANT = web.RequestKey("tenant", str)
# Model names may contain slashes, and so does the rest of a path.
_NAMES = {"model": "(.+)", "path": "(.*)"}

T = TypeVar("T")

# Bytes buffered at most for a client that reads slower than its answer is generated.
MAX_UNSENT_BYTES = 1 << 20
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Without this, nginx and similar proxies buffer responses.
    "x-accel-buffering": "no",
}


class AnsweredLine(NamedTuple):
    """The answer to a line of a batch."""

    request_id: str
    body: bytes


class Paths(Generic[T]):
    """What answers each method and path, such as ("GET", "/v1/files/{file_id}")."""

    def __init__(self, routes: Mapping[tuple[str, str], T]) -> None:
        self._paths: dict[str, dict[str, T]] = {}
        for (method, path), route in routes.items():
            self._paths.setdefault(path, {})[method] = route
        name = re.compile(r"\{(\w+)\}")
        self._patterns = [
            (re.compile(name.sub(lambda x: _NAMES.get(x[1], "([^/]+)"), path)), methods)
            for path, methods in self._paths.items()
            if "{" in path
        ]

    def find(self, path: str) -> tuple[Mapping[str, T], tuple[str, ...]]:
        """Return what answers a path, by method, and the names in the path."""
        if path in self._paths:
            return self._paths[path], ()
        for pattern, methods in self._patterns:
            if found := pattern.fullmatch(path):
                return methods, found.groups()
        return {}, ()


def authorization_of(request: web.BaseRequest) -> str | None:
    """Return the Authorization header, or one made from Anthropic's `x-api-key`."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", None if key is None else f"Bearer {key}")


def request_id_of(request: web.BaseRequest, named: str | None, prefix: str) -> str:
    """Return the request id, with the endpoint's prefix: from the header, from the body (`named`),
    or new. The response's headers repeat it."""
    given, field = request.headers.get("x-request-id"), "x-request-id"
    if given is None:
        given, field = named, "request_id"
    if given is None:
        request_id = request[HEADERS]["x-request-id"] = new_request_id(prefix)
        return request_id
    request[HEADERS]["x-request-id"] = check_request_id(given, field=field)
    return prefix + given


async def read_body(request: web.BaseRequest) -> bytes:
    """Read a JSON body. Raises RequestTooLarge, DeadlineExceeded for a slow body,
    UnsupportedMediaType, and InvalidRequest."""
    # Browsers send other content types for a page of any origin without a CORS preflight.
    kind = request.headers.get("content-type", "")
    if kind != _JSON and kind.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(
            f"the body must have Content-Type: {_JSON}, not {kind!r}", field="content-type"
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not supported", field="content-encoding")
    # Answered here, so that a body that is too large is refused before the client sends it.
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport:
        if (request.content_length or 0) > request.client_max_size:
            raise _too_large(request)
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():
            body = request.content.read_nowait()
            if len(body) > request.client_max_size:
                raise _too_large(request)
            return body
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request) from None


def _too_large(request: web.BaseRequest) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {request.client_max_size} bytes")


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type=_JSON)


class Sink(Protocol):
    """Receives an encoded answer. `has_begun`: the status is sent and can no longer report an
    error."""

    @property
    def has_begun(self) -> bool: ...
    def send(self, events: bytes) -> bool:
        """Take events without waiting. Return False if the client is too far behind."""
        ...

    def end(self, last: bytes, *, is_good: bool) -> None:
        """Take the last events, or the whole body."""
        ...


class Encoder:
    """Encodes the deltas of an answer, and hands them to its sink."""

    def __init__(self, writer: Writer, sink: Sink) -> None:
        self._write = writer.write
        self._send = sink.send
        self._writer, self._sink = writer, sink
        self._last = b""

    def write(self, delta: AnswerDelta) -> bool:
        events = self._write(delta)
        if delta.usage is not None:
            # The very last delta is sent with the end of the body: one write less.
            self._last = events
            return True
        return not events or self._send(events)

    def end(self) -> None:
        """Raises InternalError if the answer is incomplete."""
        self._sink.end(self._last + self._writer.end(), is_good=True)

    def fail(self, error: PdserveError) -> None:
        self._sink.end(self._last + self._writer.fail(error), is_good=False)


class WholeBody:
    """Sink of an answer that is not streamed."""

    has_begun = False

    def __init__(self) -> None:
        self.body = b""

    @property
    def response(self) -> web.Response:
        return web.Response(body=self.body, content_type="application/json")

    def send(self, events: bytes) -> bool:
        raise AssertionError("a whole answer has no events")

    def end(self, last: bytes, *, is_good: bool) -> None:
        self.body = last


class EventResponse(web.StreamResponse):
    """A response of server-sent events. `last`: events to send with the end of the body."""

    last = b""
    # As in web.Response: the headers are sent with the first events.
    _send_headers_immediately = False

    async def write_eof(self, data: bytes = b"") -> None:
        last, self.last = self.last, b""
        await super().write_eof(last + data)


class EventStream:
    """Sink that sends server-sent events. The response begins with the first delta.

    Tokens are written to the transport synchronously, not through aiohttp's writer, so that a token
    costs no task switch.
    """

    def __init__(self, request: web.BaseRequest, headers: dict[str, str]) -> None:
        self._request = request
        self._chunked = request.version >= HttpVersion11
        self._transport: asyncio.Transport | None = None
        self.response = EventResponse(headers={**EVENT_STREAM, **headers})

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    def send(self, events: bytes) -> bool:
        transport = self._transport
        if transport is None:
            self._begin(events)
            return True
        if not transport.is_closing():
            size = len(events)
            transport.write(b"%x\r\n%b\r\n" % (size, events) if self._chunked else events)
        return transport.get_write_buffer_size() <= MAX_UNSENT_BYTES

    def end(self, last: bytes, *, is_good: bool) -> None:
        self.response.last = last

    def _begin(self, events: bytes) -> None:
        """Write the headers and the first events in one piece."""
        self._transport = self._request.transport
        if self._transport is None:
            return
        writer = _run(self.response.prepare(self._request))
        assert isinstance(writer, StreamWriter)
        _run(writer.write(events, drain=False))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run an aiohttp coroutine that only fills buffers, and never waits, to its end."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("aiohttp waits where it should not")
