"""Endpoints that requests are replayed against."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp

from benchmarks.errors import BenchError, TargetError
from benchmarks.sse import CompletionStream, error_text
from pdserve import rpc

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from benchmarks.records import Timeline

PreparedT = TypeVar("PreparedT")

PROBE_TIMEOUT_S = 30.0
_ERROR_BODY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a target; None for what the endpoint does not tell."""

    name: str
    max_model_len: int | None
    vocab_size: int | None


class Target(Protocol[PreparedT]):
    """An endpoint that completes a prompt of token ids with an exact number of tokens.

    ``prepare`` does all work that can be done before the clock starts. ``send`` marks the timeline
    as sent, adds each chunk as it arrives and completes it; a request that the endpoint fails
    raises :class:`TargetError`. Cancelling ``send`` ends the request at the endpoint.
    """

    @property
    def kind(self) -> str:
        """``http`` or ``grpc``."""
        ...

    @property
    def address(self) -> str:
        """Where the endpoint listens."""
        ...

    async def model(self, name: str | None) -> ServedModel:
        """The model called ``name``, or the only one; :class:`BenchError` if there is none."""
        ...

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> PreparedT:
        """Encode one request."""
        ...

    async def send(self, prepared: PreparedT, timeline: Timeline) -> None:
        """Send one request and follow its stream to the end."""
        ...

    async def aclose(self) -> None:
        """Close the connections; requests still running are broken off."""
        ...


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as it goes out."""

    request_id: str
    body: bytes


class HttpTarget:
    """Any server of OpenAI's ``/v1/completions`` that takes token-id prompts and ``ignore_eos``.

    Owns its connections, one for each request in flight. ``tls`` is as aiohttp takes it. Must be
    made inside a running loop.
    """

    kind = "http"

    def __init__(self, url: str, api_key: str = "", tls: ssl.SSLContext | bool = True) -> None:
        self.address = base_url(url)
        self._session = aiohttp.ClientSession(
            # The schedule decides how many are in flight; a pool limit would close the open loop.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            headers={"Content-Type": "application/json", **dict(rpc.authorization(api_key))},
        )

    async def model(self, name: str | None) -> ServedModel:
        """Ask ``/v1/models``; raises :class:`BenchError` if that fails or lacks ``name``."""
        url = f"{self.address}/v1/models"
        try:
            async with (
                asyncio.timeout(PROBE_TIMEOUT_S),
                self._session.get(url) as response,
            ):
                response.raise_for_status()
                listing = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(
                f"cannot list models at {url}: {_reason(error)}; is the server running there?"
            ) from None
        return pick_model(_model_entries(url, listing), name)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> HttpRequest:
        """Encode the body of one greedy completion of exactly ``output_tokens`` tokens."""
        body = {
            "model": model.name,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return HttpRequest(request_id, json.dumps(body, separators=(",", ":")).encode())

    async def send(self, prepared: HttpRequest, timeline: Timeline) -> None:
        """Post one request and read its stream; the caller's deadline is the only one."""
        stream = CompletionStream(timeline)
        timeline.mark_sent()
        try:
            async with self._session.post(
                f"{self.address}/v1/completions",
                data=prepared.body,
                headers={"X-Request-Id": prepared.request_id},
            ) as response:
                if response.status != 200:
                    raise TargetError(await _refusal(response))
                async for piece in response.content.iter_any():
                    stream.feed(piece, timeline.now())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TargetError(f"connection failed: {_reason(error)}") from None
        timeline.complete(stream.answer())

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()


def base_url(url: str) -> str:
    """``url`` without a trailing slash or ``/v1``; raises :class:`BenchError` if it is not one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise BenchError(f"--url {url!r} is not like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def pick_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model called ``name``, or the only one; raises :class:`BenchError` if there is none."""
    names = ", ".join(model.name for model in models) or "none"
    if name is not None:
        for model in models:
            if model.name == name:
                return model
        raise BenchError(f"--model {name!r} is not served there; served: {names}")
    if len(models) != 1:
        raise BenchError(f"say which model to use with --model; served: {names}")
    return models[0]


def _model_entries(url: str, listing: object) -> list[ServedModel]:
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        raise BenchError(f"{url} did not answer with OpenAI's list of models")
    return [
        ServedModel(
            name=entry["id"],
            max_model_len=_positive_int(entry.get("max_model_len")),
            vocab_size=_positive_int(entry.get("vocab_size")),
        )
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


def _positive_int(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


async def _refusal(response: aiohttp.ClientResponse) -> str:
    raw = await response.content.read(_ERROR_BODY_BYTES)
    text = raw.decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        text = error_text(json.loads(raw))
    return f"HTTP {response.status}: {text or response.reason}"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
