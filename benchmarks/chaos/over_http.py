"""Requests over HTTP. With several routers an answer that breaks off goes on at the next one, as
docs/operations.md has it for clients of any kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from benchmarks.chaos.refusals import BEGUN, ELSEWHERE, Refused
from benchmarks.errors import BenchError
from pdserve.client import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.chaos.answers import Outcome
    from benchmarks.chaos.asks import Ask

DONE: Final = b"[DONE]"
_PAUSE_S: Final = 0.1


class BrokenOff(BenchError):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class _Sending:
    """One request; ``had`` are the tokens that came, known where there are several routers."""

    body: dict[str, Any]
    headers: dict[str, str]
    outcome: Outcome
    slow_s: float
    had: list[int] = field(default_factory=list)


class HttpAsker:
    """Sends to the first of ``urls``, and to the next one where that fails. The session is its
    caller's."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], model: str) -> None:
        self._session, self._urls, self._model = session, tuple(urls), model
        self._at = 0

    async def ask(self, ask: Ask, outcome: Outcome, slow_s: float) -> None:
        """Raises BenchError, aiohttp.ClientError and OSError."""
        sending = _Sending(_body(ask, self._model), {}, outcome, slow_s)
        if len(self._urls) > 1:
            sending.headers["idempotency-key"] = uuid.uuid4().hex
            sending.body["return_token_ids"] = ask.face == "sse"
        failures, since_s = 0, 0.0
        while True:
            at, pieces = self._at, outcome.pieces
            try:
                await self._once(self._urls[at], sending)
                return
            except (BenchError, aiohttp.ClientError, OSError) as error:
                if outcome.pieces > pieces or not failures:
                    failures, since_s = 0, time.monotonic()
                is_late = time.monotonic() - since_s > PATIENCE_S
                has_begun = bool(sending.had)
                if len(self._urls) == 1 or is_late or not _is_of_now(error, has_begun=has_begun):
                    raise
            failures += 1
            if self._at == at:
                self._at = (at + 1) % len(self._urls)
            if sending.had:
                sending.body["resume_token_ids"] = sending.had[:]
            if failures >= len(self._urls):
                await asyncio.sleep(_PAUSE_S)

    async def _once(self, url: str, sending: _Sending) -> None:
        async with self._session.post(
            f"{url}/v1/completions", json=sending.body, headers=sending.headers
        ) as response:
            if response.status != 200:
                raise _refused(f"HTTP {response.status}", await response.text())
            if sending.body["stream"]:
                await _read_stream(response, sending)
            else:
                _take(sending.outcome, await response.json())
                sending.outcome.hear(time.monotonic())


def _is_of_now(error: Exception, *, has_begun: bool) -> bool:
    if isinstance(error, Refused):
        return error.code in ELSEWHERE or (has_begun and error.code in BEGUN)
    return True


def _refused(what: str, text: str) -> BenchError:
    try:
        error = json.loads(text)["error"]
        return Refused(f"{what}: {error['message']}", str(error["code"] or ""))
    except (ValueError, KeyError, TypeError):
        return BenchError(f"{what}: {text[:200]}")


async def payloads(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What each whole event of a stream holds, :data:`DONE` too. Raises :class:`BrokenOff` where it
    ended before that."""
    is_done = False
    async for line in response.content:
        if line.startswith(b"data:") and line.endswith(b"\n"):
            payload = line[5:].strip()
            is_done = is_done or payload == DONE
            yield payload
    if not is_done:
        raise BrokenOff("the stream ended before [DONE]")


async def _read_stream(response: aiohttp.ClientResponse, sending: _Sending) -> None:
    outcome = sending.outcome
    async for payload in payloads(response):
        outcome.hear(time.monotonic())
        if payload != DONE:
            event = json.loads(payload)
            if event.get("error"):
                raise _refused("error in the stream", payload.decode())
            _take(outcome, event)
            for item in event.get("choices") or ():
                sending.had += item.get("token_ids") or ()
        if sending.slow_s:
            await asyncio.sleep(sending.slow_s)


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


def _take(outcome: Outcome, event: dict[str, Any]) -> None:
    for item in event.get("choices") or ():
        choice = outcome.choice(item["index"])
        choice.text += item.get("text") or ""
        choice.finish = item.get("finish_reason") or choice.finish
    usage = event.get("usage")
    if usage:
        outcome.completion_tokens = usage["completion_tokens"]
    with contextlib.suppress(KeyError, TypeError):
        outcome.fallbacks = tuple(event["pdserve"]["receipt"]["fallbacks"])
