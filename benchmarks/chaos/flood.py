"""One client of many: sends a request and says what became of it."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import aiohttp

from benchmarks.chaos.over_http import DONE, payloads
from benchmarks.errors import BenchError
from pdserve.errors import Overloaded, PdserveError, Unavailable
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pdserve.client import Client, Delta

Fate = Literal["served", "refused", "failed"]
OUTPUT_TOKENS: Final = 32
# No request may take so long, whatever the load.
TIMEOUT_S: Final = 90.0
_REFUSALS: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Met:
    """What became of one request, sent at ``sent_s`` of the monotonic clock. ``ttft_s`` and
    ``text`` of one that was served, ``retry_after_s`` of one that was refused."""

    sent_s: float
    fate: Fate
    ttft_s: float = 0.0
    text: str = ""
    retry_after_s: float = 0.0
    error: str = ""


class Flood:
    """Greedy answers of one length, over HTTP as a stream and over gRPC. Owns neither connection.

    What both faces answer for one prompt is the same text.
    """

    def __init__(
        self, client: Client, session: aiohttp.ClientSession, url: str, model: str
    ) -> None:
        self._client, self._session, self._model = client, session, model
        self._url = f"{url}/v1/completions"

    async def over_http(self, prompt: Sequence[int]) -> Met:
        """Follow one request to its end."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        sent_s = time.monotonic()
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status in _REFUSALS:
                    retry_s = float(response.headers.get("Retry-After", 0))
                    return Met(sent_s, "refused", retry_after_s=retry_s)
                if response.status != 200:
                    raise BenchError(f"HTTP {response.status}: {(await response.text())[:200]}")
                return await _read(response, sent_s)
        except (aiohttp.ClientError, BenchError, OSError, TimeoutError) as error:
            return Met(sent_s, "failed", error=f"{type(error).__name__}: {error}")

    async def over_grpc(self, prompt: Sequence[int]) -> Met:
        """Follow one request to its end."""
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0)
        sent_s = time.monotonic()
        first_s, text = 0.0, ""
        deltas = self._client.generate(prompt, sampling, timeout_s=TIMEOUT_S)
        try:
            async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
                async for delta in deltas:
                    first_s = first_s or time.monotonic()
                    text += delta.text
        except (Overloaded, Unavailable) as error:
            if first_s:
                return Met(sent_s, "failed", error=f"after its first token: {error}")
            return Met(sent_s, "refused", retry_after_s=error.retry_after_s)
        except PdserveError as error:
            return Met(sent_s, "failed", error=f"{type(error).__name__}: {error}")
        return Met(sent_s, "served", first_s - sent_s, text)


async def _read(response: aiohttp.ClientResponse, sent_s: float) -> Met:
    first_s, text = 0.0, ""
    async for payload in payloads(response):
        first_s = first_s or time.monotonic()
        if payload == DONE:
            continue
        event = json.loads(payload)
        if event.get("error"):
            raise BenchError(f"error in the stream: {event['error'].get('message')}")
        text += "".join(choice.get("text") or "" for choice in event.get("choices") or ())
    return Met(sent_s, "served", first_s - sent_s, text)
