"""An OpenAI server without a model: `python -m benchmarks.micro.mock_server PORT STEP_S`.

Like an engine it makes one token at each step for every answer that was open when the step began.
The text of a token is the time of its step (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

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


class Connection(asyncio.Protocol):
    """One keep-alive connection. `left` counts the tokens still to make."""

    def __init__(self, open_answers: set[Connection], wake: asyncio.Event) -> None:
        self._open, self._wake = open_answers, wake
        self._buffer = b""
        self.left = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            fields = dict(x.lower().split(b": ", 1) for x in head.split(b"\r\n")[1:] if b": " in x)
            length = int(fields.get(b"content-length", b"0"))
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            if b"/v1/chat/completions" in head.split(b"\r\n")[0]:
                self.transport.write(_HEAD)
                self.left = int(json.loads(body)["max_tokens"])
                self._open.add(self)
                self._wake.set()
            else:
                text = json.dumps(_MODELS).encode()
                answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d"
                self.transport.write(answer % len(text) + b"\r\n\r\n" + text)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(port: int, step_s: float) -> None:
    open_answers: set[Connection] = set()
    wake = asyncio.Event()
    loop = asyncio.get_running_loop()
    await loop.create_server(
        lambda: Connection(open_answers, wake), "127.0.0.1", port, backlog=4096
    )
    while True:
        await wake.wait()
        wake.clear()
        while open_answers:
            batch = list(open_answers)
            await asyncio.sleep(step_s)
            now = time.monotonic()
            event = _chunk((_EVENT % (now, "null")).encode())
            last = _chunk((_EVENT % (now, '"length"')).encode()) + _chunk(b"data: [DONE]\n\n")
            for each in batch:
                if each not in open_answers:
                    continue  # its client has left
                each.left -= 1
                each.transport.write(event if each.left else last + b"0\r\n\r\n")
                if not each.left:
                    open_answers.discard(each)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
