"""A scripted OpenAI endpoint in this process, for tests of clients."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

RECEIPT = {
    "queue_s": 0.001,
    "prefill_s": 0.25,
    "transfer_s": 0.125,
    "decode_s": 0.5,
    "transfer_bytes": 4096,
    "transfer_blocks": 2,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
    "cached_tokens": 0,
    "first_token_source": "prefill",
    "fallbacks": [],
}


@dataclass
class FakeOpenAI:
    """An endpoint that streams the requested number of tokens, unless `fault` selects a fault.

    `fault` is called with the number of a request, from 0 in the order of arrival. No request is
    answered before `hold_until` requests have arrived. `client_left` is set when a client
    disconnects.
    """

    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "demo", "max_model_len": 8192, "vocab_size": 2048}]
    )
    fault: Callable[[int], str | None] = lambda _number: None
    hold_until: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    all_came: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    port: int = 0  # 0: any free one

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeOpenAI]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.fault(len(self.bodies))
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        self.sessions.append(request.headers.get("X-Session-Id", ""))
        if len(self.bodies) >= self.hold_until:
            self.all_came.set()
        if fault == "refuse":
            error = {"error": {"message": "full", "type": "overloaded", "code": 429}}
            return web.json_response(error, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await self.all_came.wait()
            await response.prepare(request)
            await _stream(request, response, body, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            self.client_left.set()
            raise
        return response


async def _stream(
    request: web.Request, response: web.StreamResponse, body: dict[str, Any], fault: str | None
) -> None:
    async def send(event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    tokens = body["max_tokens"] - (fault == "short")
    for left in range(tokens - 1, -1, -1):
        choice = {"index": 0, "text": "x", "finish_reason": None if left else "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = [left]
        await send({"choices": [choice], "usage": None})
        if fault == "break":
            assert request.transport is not None
            request.transport.abort()
            return
        if fault == "hang":
            await asyncio.Event().wait()
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
    await send({"choices": [], "usage": usage, "pdserve": {"receipt": RECEIPT}})
    await response.write(b"data: [DONE]\n\n")
