"""Clients that send requests to every API of a service, at a fixed rate, until cancelled.

All prompts and idempotency keys are drawn from small pools. So the state that the service keeps for
them is bounded, and the bound is reached during the warm-up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import grpc.aio

from benchmarks.batches import BatchClient
from benchmarks.errors import BenchError
from pdserve.client import Client
from pdserve.errors import PdserveError
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

PROMPTS: Final = 200
KEYS: Final = 40
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
# The possible ends of each API's stream.
_ENDS: Final = {
    CHAT: (b"[DONE]",),
    COMPLETIONS: (b"[DONE]",),
    RESPONSES: (b"response.completed", b"response.incomplete"),
    MESSAGES: (b"message_stop",),
}
# Relative frequency of each kind of request.
WEIGHTS: Final[Mapping[str, int]] = {
    "stream": 40,
    "whole": 30,
    "abort": 10,
    "grpc": 10,
    "keyed": 6,
    "conversation": 3,
    "batch": 1,
}
_TIMEOUT = aiohttp.ClientTimeout(total=120.0)
_FAILURES = (BenchError, PdserveError, aiohttp.ClientError, grpc.aio.AioRpcError, TimeoutError)
_SHOWN_ERRORS: Final = 5
_BATCH_LINES: Final = 4


class Traffic:
    """The clients of a soak test. Must be created inside a running loop. `counts` is by (kind of
    request, outcome): `ok`, `aborted` or `failed`."""

    def __init__(self, ready: Mapping[str, Any], seed: int) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.errors: list[str] = []
        self._model = ready["model"]
        self._rng = random.Random(seed)
        self._http = aiohttp.ClientSession(ready["http"], timeout=_TIMEOUT)
        self._grpc = Client([x["grpc"] for x in ready["routers"]])
        self._batches = BatchClient(ready["http"])
        self._ways: Mapping[str, Callable[[], Awaitable[None]]] = {
            "stream": self._stream,
            "whole": self._whole,
            "abort": self._abort,
            "grpc": self._over_grpc,
            "keyed": self._keyed,
            "conversation": self._conversation,
            "batch": self._batch,
        }

    async def aclose(self) -> None:
        await self._http.close()
        await self._batches.aclose()
        await self._grpc.close()

    async def run(self, rate_per_s: float, clients: int) -> None:
        """Run `clients` clients until cancelled. Each pauses between its requests, so that all
        together send about `rate_per_s` requests per second."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(self._client(rate_per_s / clients))

    async def _client(self, rate_per_s: float) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(rate_per_s))
            (kind,) = self._rng.choices([*WEIGHTS], [*WEIGHTS.values()])
            try:
                await self._ways[kind]()
            except _FAILURES as error:
                self.counts[kind, "failed"] += 1
                if len(self.errors) < _SHOWN_ERRORS:
                    self.errors.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                self.counts[kind, "aborted" if kind == "abort" else "ok"] += 1

    def _body(self, path: str, *, number: int | None = None, **more: Any) -> dict[str, Any]:
        number = self._rng.randrange(PROMPTS) if number is None else number
        text = f"Question {number}. " + "What does the fox do then? " * (number % 12)
        limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 16 + number % 24}
        turns = [{"role": "user", "content": text}]
        fields: dict[str, dict[str, Any]] = {
            COMPLETIONS: {"prompt": text},
            RESPONSES: {"input": text, "store": False},
        }
        asked = fields.get(path, {"messages": turns})
        return {"model": self._model, "temperature": 0.0, **limit, **asked, **more}

    def _api(self) -> str:
        return self._rng.choice([*_ENDS])

    async def _whole(self) -> None:
        path = self._api()
        await self._post(path, self._body(path))

    async def _stream(self) -> None:
        path = self._api()
        got = await self._post(path, self._body(path, stream=True))
        if not any(end in got[-2048:] for end in _ENDS[path]):
            raise BenchError(f"the stream of {path} ended with {got[-200:]!r}")

    async def _abort(self) -> None:
        """Start a stream and disconnect after its first bytes."""
        path = self._api()
        body = self._body(path, stream=True)
        async with self._http.post(path, json=body) as response:
            await response.content.readany()
            response.close()

    async def _over_grpc(self) -> None:
        prompt = [20 + self._rng.randrange(PROMPTS)] * 40
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        async for _ in self._grpc.generate(prompt, sampling, model=self._model):
            pass

    async def _keyed(self) -> None:
        number = self._rng.randrange(KEYS)
        headers = {"Idempotency-Key": f"soak-{number}"}
        await self._post(CHAT, self._body(CHAT, number=number), headers)

    async def _conversation(self) -> None:
        """Store a response, continue it, and delete both."""
        first = await self._response(self._body(RESPONSES, store=True))
        more = self._body(RESPONSES, store=True, previous_response_id=first)
        for stored in (first, await self._response(more)):
            async with self._http.delete(f"{RESPONSES}/{stored}") as response:
                await _good(response)

    async def _response(self, body: Mapping[str, Any]) -> str:
        async with self._http.post(RESPONSES, json=body) as response:
            await _good(response)
            stored: str = (await response.json())["id"]
            return stored

    async def _batch(self) -> None:
        bodies = {f"line-{n}": self._body(COMPLETIONS) for n in range(_BATCH_LINES)}
        batch = await self._batches.begin(bodies)
        await self._batches.until(batch, lambda x: x["status"] == "completed")
        if len(await self._batches.answers(batch)) != _BATCH_LINES:
            raise BenchError(f"batch {batch} lacks answers")
        await self._batches.delete_files(batch)

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> bytes:
        async with self._http.post(path, json=body, headers=headers) as response:
            await _good(response)
            return await response.read()


async def _good(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.read())[:300].decode(errors="replace")
        raise BenchError(f"{response.method} {response.url.path}: {response.status} {text}")
