"""Writers of an HTTP answer: an event stream, or one body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.http_writer import StreamWriter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from pdserve.errors import PdserveError
    from router.attempt.answer import AnswerDelta
    from router.dialects.fields import Writer

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


class DeltaEncoder:
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
        if self._transport is None or self._transport.is_closing():
            return  # the client has left: aiohttp's writer would raise
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
