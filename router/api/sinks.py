"""Where the answer to an HTTP request goes: into an event stream, or into one body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiohttp import HttpVersion11, web
from aiohttp.http_writer import StreamWriter

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from pdserve.errors import PdserveError
    from router.answer import AnswerDelta

T = TypeVar("T")

# Bytes that may wait in the router for a client that reads slower than its answer is made.
MAX_UNSENT_BYTES = 1 << 20
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx and proxies like it buffer responses without this.
    "x-accel-buffering": "no",
}


class Writer(Protocol):
    """Encodes an answer as one endpoint has it."""

    def write(self, delta: AnswerDelta) -> bytes:
        """Return the events of `delta`; nothing where the answer is not streamed."""
        ...

    def end(self) -> bytes:
        """Return the last events, or the whole body. Raises InternalError if the answer is
        incomplete."""
        ...

    def fail(self, error: PdserveError) -> bytes:
        """Return the event that ends a stream with an error."""
        ...


class Sink(Protocol):
    """Takes an answer. `has_begun` once an error can no longer be told by the status."""

    @property
    def has_begun(self) -> bool: ...
    def write(self, delta: AnswerDelta) -> bool: ...
    def end(self) -> None: ...
    def fail(self, error: PdserveError) -> None: ...


class WholeBody:
    """An answer that is not streamed."""

    has_begun = False

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.body = b""

    def write(self, delta: AnswerDelta) -> bool:
        self._writer.write(delta)
        return True

    def end(self) -> None:
        self.body = self._writer.end()

    def fail(self, error: PdserveError) -> None:
        raise error


class EventResponse(web.StreamResponse):
    """A response of server-sent events. `last` are those that go out with the end of the body."""

    last = b""
    # As in web.Response: the head goes out with the first events.
    _send_headers_immediately = False

    async def write_eof(self, data: bytes = b"") -> None:
        last, self.last = self.last, b""
        await super().write_eof(last + data)


class EventStream:
    """Writes an answer as server-sent events. The response begins with the first delta.

    Tokens are written synchronously, past aiohttp's writer: a token costs no task switch.
    """

    def __init__(self, request: web.BaseRequest, headers: dict[str, str], writer: Writer) -> None:
        self._request = request
        self._writer = writer
        self._chunked = request.version >= HttpVersion11
        self._transport: asyncio.Transport | None = None
        self.response = EventResponse(headers={**EVENT_STREAM, **headers})

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    def write(self, delta: AnswerDelta) -> bool:
        """Return False if the client is too far behind."""
        events = self._writer.write(delta)
        if delta.usage is not None:
            # The last delta of all goes out with the end of the body.
            self.response.last = events
            return True
        if not events:
            return True
        transport = self._transport
        if transport is None:
            self._begin(events)
            return True
        if not transport.is_closing():
            size = len(events)
            transport.write(b"%x\r\n%b\r\n" % (size, events) if self._chunked else events)
        return transport.get_write_buffer_size() <= MAX_UNSENT_BYTES

    def end(self) -> None:
        """Raises InternalError if the answer is incomplete."""
        self.response.last += self._writer.end()

    def fail(self, error: PdserveError) -> None:
        self.response.last += self._writer.fail(error)

    def _begin(self, events: bytes) -> None:
        """Write the head and the first events in one piece."""
        self._transport = self._request.transport
        if self._transport is None:
            return
        writer = _run(self.response.prepare(self._request))
        assert isinstance(writer, StreamWriter)
        _run(writer.write(events, drain=False))


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of aiohttp that only fills buffers, and never waits, to its end."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("aiohttp waits where it should not")
