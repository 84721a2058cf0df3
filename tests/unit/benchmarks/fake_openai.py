"""An OpenAI endpoint in this process that does as it is told, for tests of clients."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    import ssl
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
    """Streams as many tokens as asked for, unless ``fault`` names another behaviour.

    ``fault`` is asked with a request's number, from 0 in the order of arrival. Nothing is answered
    before ``hold_until_running`` requests have been there at once. State: the bodies
    and headers received, how many streams are open, and whether a client went away.
    """

    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "demo", "max_model_len": 8192, "vocab_size": 2048}]
    )
    fault: Callable[[int], str | None] = lambda _number: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    running: int = 0
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    hold_until_running: int = 0
    all_running: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    @asynccontextmanager
    async def serve(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeOpenAI]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http{'s' if tls else ''}://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        self.running += 1
        if self.running >= self.hold_until_running:
            self.all_running.set()
        try:
            return await self._answer(request, body, self.fault(number))
        except (asyncio.CancelledError, ConnectionResetError):
            self.client_left.set()
            raise
        finally:
            self.running -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], fault: str | None
    ) -> web.StreamResponse:
        if fault == "refuse":
            error = {"error": {"message": "full", "type": "overloaded", "code": 429}}
            return web.json_response(error, status=429)
        await self.all_running.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = body["max_tokens"] - (1 if fault == "short" else 0)
        for token in range(tokens):
            last = token == tokens - 1
            choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
            await _send(response, {"choices": [choice], "usage": None})
            if fault == "break":
                assert request.transport is not None
                request.transport.abort()
                return response
            if fault == "hang":
                await asyncio.Event().wait()
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        await _send(response, {"choices": [], "usage": usage, "pdserve": {"receipt": RECEIPT}})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
