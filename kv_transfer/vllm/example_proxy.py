"""Example proxy in front of two plain `vllm serve` processes with PdConnector.

docs/kv_transfer.md has the commands and the contract.

    python -m kv_transfer.vllm.example_proxy --prefill http://HOST:PORT --decode http://HOST:PORT

The proxy sends the request to prefill with a limit of one token. The answer names the location of
the KV, which the proxy sends to decode with the whole request. With `--at-once`, only the first
request runs so. Afterwards the proxy knows the location, generates the transfer ids itself, and
sends to both servers at the same time, so that blocks are transferred while prefill computes.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Body = dict[str, Any]
# Fields that could make prefill generate more than one token, or are invalid without a stream.
_NOT_FOR_PREFILL = frozenset({"n", "min_tokens", "max_completion_tokens", "stream_options"})


class Proxy:
    """The handlers of the proxy. State: the location of prefill's KV, from its last answer."""

    def __init__(self, prefill: str, decode: str, *, at_once: bool) -> None:
        self._prefill, self._decode, self._at_once = prefill, decode, at_once
        self._producer: Body = {}
        self._client: aiohttp.ClientSession

    async def session(self, _: web.Application) -> AsyncIterator[None]:
        """Keep connections to both servers open while the proxy serves."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._client:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not (self._at_once and self._producer):
            kv = await self._run_prefill(request.path, body, {"do_remote_decode": True})
            return await self._run_decode(request, {**body, "kv_transfer_params": kv})
        transfer = {"transfer_id": uuid.uuid4().hex}
        kv = {"do_remote_prefill": True, **transfer, **self._producer}
        prefill = asyncio.create_task(
            self._run_prefill(request.path, body, {"do_remote_decode": True, **transfer})
        )
        try:
            return await self._run_decode(request, {**body, "kv_transfer_params": kv})
        finally:
            prefill.cancel()  # its KV is no longer needed
            await asyncio.gather(prefill, return_exceptions=True)

    async def models(self, _: web.Request) -> web.Response:
        async with self._client.get(self._decode + "/v1/models") as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def _run_prefill(self, path: str, body: Body, kv: Body) -> Body | None:
        """Compute the prompt and one token, which decode samples again.

        Return the parameters for decode, or None if prefill failed: then decode computes the
        prompt itself.
        """
        short = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
        short |= {"max_tokens": 1, "stream": False, "kv_transfer_params": kv}
        try:
            async with self._client.post(self._prefill + path, json=short) as answer:
                found: Body | None = (await answer.json()).get("kv_transfer_params")
        except aiohttp.ClientError:
            found = None
        self._producer = {k: v for k, v in (found or {}).items() if k.startswith("producer_")}
        return found

    async def _run_decode(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Forward decode's answer while it arrives."""
        async with self._client.post(self._decode + request.path, json=body) as answer:
            piece = await answer.content.readany()
            failed = answer.status == 500 or piece.startswith(b'data: {"error"')
            if failed and body["kv_transfer_params"] is not None:
                self._producer = {}  # prefill may have restarted
                return await self._run_decode(request, {**body, "kv_transfer_params": None})
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            while piece:
                await response.write(piece)
                piece = await answer.content.readany()
            await response.write_eof()
            return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--at-once", action="store_true", help="do not wait for prefill's answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode, at_once=options.at_once)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.session)
    app.router.add_get("/v1/models", proxy.models)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, proxy.answer)
    web.run_app(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
