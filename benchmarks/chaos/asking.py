"""Sends requests over gRPC and HTTP and follows each to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, Self, cast

import aiohttp

from benchmarks.errors import BenchError
from pdserve.client import Client
from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

    from benchmarks.chaos.answers import Outcome
    from benchmarks.chaos.asks import Ask
    from pdserve.client import Delta

# No request of ours may take so long, whatever happens to it.
TIMEOUT_S = 120.0


class Asker:
    """Owns the connections to one router. ``timeout_s`` is each request's own."""

    def __init__(self, *, grpc: str, http: str, model: str, timeout_s: float = TIMEOUT_S) -> None:
        self._grpc, self._http, self._model = grpc, http, model
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(Client(self._grpc))
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def ask(self, ask: Ask, outcome: Outcome, *, slow_s: float = 0.0) -> None:
        """Follow one request to its end; cancelling it aborts it at the router. With ``slow_s`` the
        reader pauses so long after each piece."""
        send = self._over_grpc if ask.face == "grpc" else self._over_http
        try:
            async with asyncio.timeout(self._timeout_s + 10.0):
                await send(ask, outcome, slow_s)
        except (PdserveError, BenchError, aiohttp.ClientError, OSError, TimeoutError) as error:
            said = f"{type(error).__name__}: {error}"
            outcome.end("failed", time.monotonic(), said)
        except asyncio.CancelledError:
            outcome.end("aborted", time.monotonic())
            raise
        else:
            outcome.end("ok", time.monotonic())

    async def _over_grpc(self, ask: Ask, outcome: Outcome, slow_s: float) -> None:
        deltas = self._client.generate(
            ask.prompt, ask.sampling, model=self._model, timeout_s=self._timeout_s
        )
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                outcome.hear(time.monotonic())
                _take(outcome, delta)
                if slow_s:
                    await asyncio.sleep(slow_s)
        if len(outcome.choices) < ask.sampling.n or any(
            not x.finish for x in outcome.choices.values()
        ):
            raise BenchError("the stream ended before its answers")

    async def _over_http(self, ask: Ask, outcome: Outcome, slow_s: float) -> None:
        streams = ask.face == "sse"
        async with self._session.post(
            f"{self._http}/v1/completions", json=_body(ask, self._model)
        ) as response:
            if response.status != 200:
                raise BenchError(f"HTTP {response.status}: {(await response.text())[:200]}")
            if not streams:
                _take_json(outcome, await response.json())
                outcome.hear(time.monotonic())
                return
            await self._read_stream(response, outcome, slow_s)

    async def _read_stream(
        self, response: aiohttp.ClientResponse, outcome: Outcome, slow_s: float
    ) -> None:
        is_done = False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            outcome.hear(time.monotonic())
            payload = line[5:].strip()
            if payload == b"[DONE]":
                is_done = True
            else:
                event = json.loads(payload)
                if event.get("error"):
                    raise BenchError(f"error in the stream: {event['error'].get('message')}")
                _take_json(outcome, event)
            if slow_s:
                await asyncio.sleep(slow_s)
        if not is_done:
            raise BenchError("the stream ended before [DONE]")


def _body(ask: Ask, model: str) -> dict[str, Any]:
    s = ask.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(ask.prompt),
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "seed": s.seed,
        "ignore_eos": s.ignore_eos,
        "stream": ask.face == "sse",
    }
    if s.stop:
        body["stop"] = list(s.stop)
    if ask.face == "sse":
        body["stream_options"] = {"include_usage": True}
    if s.logprobs is not None:
        body["logprobs"] = s.logprobs
    return body


def _take(outcome: Outcome, delta: Delta) -> None:
    choice = outcome.choice(delta.index)
    choice.token_ids += delta.token_ids
    choice.text += delta.text
    choice.logprobs += [(x.sampled.token_id, x.sampled.logprob) for x in delta.logprobs]
    if delta.finish_reason is not None:
        choice.finish = str(delta.finish_reason)
    if delta.usage is not None:
        outcome.completion_tokens = delta.usage.completion_tokens
    if delta.receipt is not None:
        outcome.fallbacks = delta.receipt.fallbacks


def _take_json(outcome: Outcome, event: dict[str, Any]) -> None:
    for item in event.get("choices") or ():
        choice = outcome.choice(item["index"])
        choice.text += item.get("text") or ""
        choice.finish = item.get("finish_reason") or choice.finish
    usage = event.get("usage")
    if usage:
        outcome.completion_tokens = usage["completion_tokens"]
    with contextlib.suppress(KeyError, TypeError):
        outcome.fallbacks = tuple(event["pdserve"]["receipt"]["fallbacks"])
