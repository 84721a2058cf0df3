"""An OpenAI server without a model: `python -m benchmarks.micro.mock_server PORT STEP_S`.

Like an engine, it generates one token per step for every answer open when the step begins. The text
of a token is the time of its step (CLOCK_MONOTONIC). A request without streaming is a prefill: it
is answered after one step, with the fields that vLLM's connector returns to a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import uvloop
from aiohttp import web

_EVENT = (
    'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,'
    '"model":"mock","choices":[{"index":0,"delta":{"content":"%.6f "},"logprobs":null,'
    '"finish_reason":%s}]}\n\n'
)
_PREFILLED = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 1760000000,
    "model": "mock",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": ""}}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": list(range(4))},
}
_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}


class MockEngine:
    """A fake engine. State: remaining tokens of each open answer."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[web.StreamResponse, int] = {}
        self._wake = asyncio.Event()
        self._ended: dict[web.StreamResponse, asyncio.Event] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            await asyncio.sleep(self._step_s)
            return web.json_response(_PREFILLED)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        ended = self._ended[response] = asyncio.Event()
        self._left[response] = int(body["max_tokens"])
        self._wake.set()
        try:
            await ended.wait()
        finally:
            self._left.pop(response, None)
            del self._ended[response]
        return response

    async def run(self) -> None:
        while True:
            self._wake.clear()
            await self._wake.wait()
            while self._left:
                batch = list(self._left)
                await asyncio.sleep(self._step_s)
                now = time.monotonic()
                event = (_EVENT % (now, "null")).encode()
                last = (_EVENT % (now, '"length"')).encode() + b"data: [DONE]\n\n"
                for each in batch:
                    if each not in self._left:
                        continue  # its client has disconnected
                    self._left[each] -= 1
                    with contextlib.suppress(ConnectionError):
                        await each.write(event if self._left[each] else last)
                    if not self._left.get(each):
                        self._left.pop(each, None)
                        self._ended[each].set()


async def serve(port: int, step_s: float) -> None:
    engine = MockEngine(step_s)

    async def models(_request: web.Request) -> web.Response:
        return web.json_response(_MODELS)

    app = web.Application()
    posts = [web.post(f"/v1/{x}", engine.answer) for x in ("chat/completions", "completions")]
    app.add_routes([*posts, web.get("/{path:.*}", models)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await engine.run()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
