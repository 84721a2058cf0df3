"""The client: many streamed chat requests at once over raw connections, as cheap as Python gets,
since it shares the cores with what it measures."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.errors import BenchError

# Each token's text is the time at which its step ended.
_TIMES = re.compile(rb'"content":\s?"((?:[0-9]+\.[0-9]+ ?)+)"')
_END = b"data: [DONE]"
_ERROR = b'data: {"error"'
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Heard:
    """What came back: tokens, and for each the seconds from its step to its arrival here."""

    tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _Stream(asyncio.Protocol):
    """One connection, which sends `requests` one after another."""

    def __init__(self, request: bytes, requests: int, heard: Heard) -> None:
        self._request, self._left, self._heard = request, requests, heard
        self._rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        # An event is cut where the network pleases: what follows the last line end waits.
        cut = data.rfind(b"\n") + 1
        data, self._rest = data[:cut], data[cut:]
        times = [float(t) for found in _TIMES.findall(data) for t in found.split()]
        self._heard.tokens += len(times)
        self._heard.latencies_s += [now - t for t in times]
        if times and not self.begun.done():
            self.begun.set_result(None)
        if _END in data:
            self._left -= 1
            self._rest = b""
            if self._left:
                self._transport.write(self._request)
            elif not self.done.done():
                self.done.set_result(None)
                self._transport.close()
        elif _ERROR in data or (
            data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200")
        ):
            self._fail(data[:800].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self._heard.failures.append(reason)
            self.done.set_result(None)
            self._transport.close()


def request(address: str, model: str, tokens: int) -> bytes:
    """One HTTP request for a streamed answer of exactly `tokens` tokens."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Say what time it is, again and again."}],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def drive(address: str, model: str, *, streams: int, tokens: int, requests: int = 1) -> Heard:
    """`streams` connections at once, each asking `requests` times for `tokens` tokens."""
    heard = Heard()
    open_streams = await _open(address, request(address, model, tokens), streams, requests, heard)
    begun = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(s.done for s in open_streams))
    except TimeoutError:
        heard.failures.append(f"no end in {TIMEOUT_S:g} s")
    heard.seconds = time.monotonic() - begun
    return heard


async def hold(address: str, model: str, *, streams: int, tokens: int) -> Held:
    """Opens `streams` streams and returns when each has had its first token. Raises BenchError
    where one ended before, or where that takes too long."""
    heard = Heard()
    open_streams = await _open(address, request(address, model, tokens), streams, 1, heard)
    held = Held(open_streams)
    begun = asyncio.gather(*(s.begun for s in open_streams))
    waited: list[asyncio.Future[Any]] = [begun, *(s.done for s in open_streams)]
    await asyncio.wait(waited, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        begun.cancel()
        held.close()
        reason = heard.failures[0] if heard.failures else f"not all began in {TIMEOUT_S:g} s"
        raise BenchError(f"idle streams of {address}: {reason}")
    return held


@dataclass(slots=True)
class Held:
    """Streams that are open and not over."""

    streams: list[_Stream]

    def close(self) -> None:
        for stream in self.streams:
            stream._transport.abort()


async def _open(
    address: str, what: bytes, streams: int, requests: int, heard: Heard
) -> list[_Stream]:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(streams):
        _, stream = await loop.create_connection(
            lambda: _Stream(what, requests, heard), host, int(port)
        )
        found.append(stream)
    return found
