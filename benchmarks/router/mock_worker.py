"""An OpenAI server without a model, for routers that are not ours: `python -m
benchmarks.router.mock_worker --port-file FILE --step-s 0.01`.

Like an engine it makes one token at each step for every answer that was open when the step began,
and writes each as one event. A token's text is the time of its step, CLOCK_MONOTONIC in seconds:
any process of this machine can tell how old it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httptools
import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,'
    '"model":"mock","choices":[{"index":0,"delta":{"content":"%.6f "},"logprobs":null,'
    '"finish_reason":%s}]}\n\n'
)
_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}


@dataclass(slots=True)
class _Answer:
    transport: asyncio.Transport
    left: int


@dataclass(slots=True)
class Steps:
    """The engine: a step every `step_s` while there are answers to go on with."""

    step_s: float
    answers: dict[_Connection, _Answer] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self.answers:
                batch = list(self.answers.items())
                await asyncio.sleep(self.step_s)
                self._step(batch)

    def _step(self, batch: list[tuple[_Connection, _Answer]]) -> None:
        now = time.monotonic()
        event = _chunk((_EVENT % (now, "null")).encode())
        last = _chunk((_EVENT % (now, '"length"')).encode()) + _chunk(b"data: [DONE]\n\n")
        for connection, answer in batch:
            if self.answers.get(connection) is not answer:
                continue  # its client has left
            answer.left -= 1
            if answer.left:
                answer.transport.write(event)
            else:
                answer.transport.write(last + b"0\r\n\r\n")
                del self.answers[connection]


class _Connection(asyncio.Protocol):
    """One keep-alive connection: HTTP in by httptools, events out as they are made."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.answers.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.startswith(b"/v1/chat/completions"):
            asked = json.loads(self._body)
            self._transport.write(_HEAD)
            self._steps.answers[self] = _Answer(self._transport, int(asked["max_tokens"]))
            self._steps.wake.set()
            return
        body = json.dumps(_MODELS).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(step_s: float, port_file: Path) -> None:
    steps = Steps(step_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(steps), "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    # A reader sees the whole number or no file.
    part = port_file.with_suffix(".part")
    part.write_text(str(port), encoding="ascii")
    part.rename(port_file)
    await steps.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    options = parser.parse_args()
    uvloop.run(_serve(options.step_s, options.port_file))


if __name__ == "__main__":
    main()
