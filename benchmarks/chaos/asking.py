"""Sends requests over gRPC and HTTP and follows each to its end."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Self, cast

import aiohttp

from benchmarks.chaos.over_http import HttpAsker
from benchmarks.chaos.refusals import code_of
from benchmarks.errors import BenchError
from pdserve.client import Client
from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from benchmarks.chaos.answers import Outcome
    from benchmarks.chaos.asks import Ask
    from pdserve.client import Delta

# No request of ours may take so long, whatever happens to it.
TIMEOUT_S = 120.0


class Asker:
    """Owns the connections to one router, or to several: then what breaks off goes on at another.
    ``timeout_s`` is each request's own."""

    def __init__(
        self, *, grpc: Sequence[str], http: Sequence[str], model: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._grpc, self._http_urls, self._model = grpc, http, model
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._stack.enter_async_context(Client(self._grpc))
        session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        self._http = HttpAsker(session, self._http_urls, self._model)
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
        send = self._over_grpc if ask.face == "grpc" else self._http.ask
        try:
            async with asyncio.timeout(self._timeout_s + 10.0):
                await send(ask, outcome, slow_s)
        except (PdserveError, BenchError, aiohttp.ClientError, OSError, TimeoutError) as error:
            said = f"{type(error).__name__}: {error}"
            outcome.end("failed", time.monotonic(), said, code_of(error))
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
