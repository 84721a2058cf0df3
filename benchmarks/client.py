"""Streaming clients for OpenAI-compatible endpoints over HTTP, and for pdserve over gRPC."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

import aiohttp
from msgspec import to_builtins

from benchmarks.errors import BenchError, TargetError
from pdserve.client import Client
from pdserve.errors import PdserveError
from pdserve.net import rpc
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pdserve.client import Delta
    from router.attempt.answer import AnswerDelta

PROBE_TIMEOUT_S: Final = 30.0
_ERROR_BODY_BYTES: Final = 4096
# The fields of an answer's usage that a record keeps.
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind an endpoint. A field is None if the endpoint does not report it."""

    name: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a stream. `tokens` is None if the endpoint does not report token counts.
    `has_choice` is False for an event with only usage or a receipt. `logprobs`: of the sampled
    tokens.
    """

    has_choice: bool = True
    index: int = 0
    tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    logprobs: tuple[float, ...] = ()
    usage: Mapping[str, int | None] | None = None
    receipt: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is ready to send. `body` is encoded JSON for HTTP, or the prompt for gRPC.
    `session`: id of its session, or ""."""

    request_id: str
    model: str
    body: Any
    sampling: SamplingParams = field(default_factory=SamplingParams)
    path: str = "/v1/completions"
    session: str = ""


class Target:
    """An endpoint that continues a prompt of token ids."""

    kind: ClassVar[str]

    def __init__(self, address: str) -> None:
        self.address = address

    async def model(self, name: str | None = None) -> ServedModel:
        """Return the model called `name`, or the only one. Raises BenchError if there is none."""
        models = {model.name: model for model in await self._models()}
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        served = f"served: {', '.join(models) or 'none'}"
        if name is None:
            raise BenchError(f"choose a model with --model; {served}")
        if name not in models:
            raise BenchError(f"--model {name!r} is not served there; {served}")
        return models[name]

    async def _models(self) -> list[ServedModel]:
        raise NotImplementedError

    def prepare(
        self,
        model: ServedModel,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        session: str = "",
    ) -> Request:
        """Encode a request. Doing this in advance keeps encoding out of the measured time."""
        return Request(request_id, model.name, tuple(prompt), sampling, session=session)

    def stream(self, request: Request) -> AsyncIterator[Piece]:
        """Send a request and yield its stream. Raises TargetError if the request fails."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close all connections. This ends the requests on them."""


def exactly(tokens: int) -> SamplingParams:
    """Return parameters for greedy sampling of exactly `tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)


class HttpTarget(Target):
    """An OpenAI-compatible server. Must be created inside a running loop. `tls` is the parameter
    `ssl` of aiohttp."""

    kind = "http"

    def __init__(self, url: str, api_key: str = "", tls: ssl.SSLContext | bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
            raise BenchError(f"--url {url!r} is not like http://127.0.0.1:8000")
        super().__init__(url.rstrip("/").removesuffix("/v1"))
        self._session = aiohttp.ClientSession(
            # No limit on connections, because it would turn the open loop into a closed one.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            headers={"Content-Type": "application/json", **dict(rpc.authorization(api_key))},
        )

    async def _models(self) -> list[ServedModel]:
        url = f"{self.address}/v1/models"
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get(url) as response:
                response.raise_for_status()
                entries = (await response.json(content_type=None))["data"]
                found = [(x["id"], x.get("max_model_len"), x.get("vocab_size")) for x in entries]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise BenchError(
                f"cannot list models at {url}: {reason}; is the server running there?"
            ) from None
        except (KeyError, TypeError, AttributeError):
            raise BenchError(f"{url} did not answer with OpenAI's list of models") from None
        return [ServedModel(*values) for values in found]

    def prepare(
        self,
        model: ServedModel,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        session: str = "",
    ) -> Request:
        body = completion_body(model.name, prompt, sampling)
        if session:
            body["return_token_ids"] = True  # the next turn's prompt has the answer in it
        encoded = json.dumps(body, separators=(",", ":")).encode()
        return Request(request_id, model.name, encoded, session=session)

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        try:
            headers = {"X-Request-Id": request.request_id, "X-Session-Id": request.session}
            headers = {name: value for name, value in headers.items() if value}
            url = self.address + request.path
            async with self._session.post(url, data=request.body, headers=headers) as response:
                if response.status != 200:
                    raw = await response.content.read(_ERROR_BODY_BYTES)
                    raise _refusal(f"HTTP {response.status}", raw)
                async for piece in read_stream(response.content.iter_any()):
                    yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TargetError(f"connection failed: {error or type(error).__name__}") from None

    async def aclose(self) -> None:
        await self._session.close()


def completion_body(model: str, prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    """Return the body of a streaming request to `/v1/completions`."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def read_stream(blocks: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
    """Parse server-sent events. Raises TargetError for an error event, and if the stream ends
    before `[DONE]`."""
    tail, counted = b"", 0
    async for block in blocks:
        *lines, tail = (tail + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            try:
                event = json.loads(payload)
            except ValueError:
                raise TargetError(f"not JSON in the stream: {payload[:80]!r}") from None
            if event.get("error"):
                raise _refusal("error in the stream", payload)
            for piece in _pieces(event, counted):
                counted = (piece.usage or {}).get("completion_tokens") or counted
                yield piece
    raise TargetError("the stream ended before [DONE]")


def _pieces(event: Mapping[str, Any], counted: int) -> list[Piece]:
    """Split one event by choice. `counted` is the last running token count, if the server sends
    one."""
    usage, tokens = event.get("usage"), None
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        usage = {name: usage.get(name) for name in _COUNTS} | {"cached_tokens": cached}
        tokens = (usage["completion_tokens"] or 0) - counted
    both: dict[str, Any] = {"usage": usage, "receipt": (event.get("pdserve") or {}).get("receipt")}
    found = []
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        piece = Piece(
            index=choice.get("index", 0),
            tokens=tokens if ids is None else len(ids),
            token_ids=tuple(ids or ()),
            text=choice.get("text") or (choice.get("delta") or {}).get("content") or "",
            finish_reason=choice.get("finish_reason"),
            **both,
        )
        found.append(piece)
    return found or [Piece(has_choice=False, **both)]


def _refusal(what: str, raw: bytes) -> TargetError:
    """Return the error in an OpenAI error object. If `raw` is something else, its text is the
    message."""
    text, code = raw.decode(errors="replace").strip(), ""
    try:
        error = json.loads(raw)["error"]
        text, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return TargetError(f"{what}: {text}", code)


class GrpcTarget(Target):
    """pdserve's `Generation` service. Must be created inside a running loop.

    With several addresses, separated by commas, an answer continues at the next router if its
    router is lost.
    """

    kind = "grpc"

    def __init__(self, addresses: str, dialer: rpc.Dialer = rpc.PLAIN, api_key: str = "") -> None:
        super().__init__(addresses)
        for address in addresses.split(","):
            if "/" in address or not address.rpartition(":")[2].isdecimal():
                raise BenchError(f"--grpc {address!r} is not like 127.0.0.1:8001")
        self._client = Client(addresses.split(","), dialer=dialer, api_key=api_key)

    async def _models(self) -> list[ServedModel]:
        try:
            cards = await self._client.list_models(timeout_s=PROBE_TIMEOUT_S)
        except PdserveError as error:
            raise BenchError(
                f"cannot list models at {self.address}: {error}; is pdserve's gRPC API there?"
            ) from None
        return [ServedModel(x.name, x.max_model_len or None, x.vocab_size or None) for x in cards]

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        try:
            async for delta in self._client.generate(
                request.body, request.sampling, model=request.model, request_id=request.request_id
            ):
                yield piece_of(delta)
        except PdserveError as error:
            raise TargetError(f"{type(error).__name__}: {error}", error.code) from None

    async def aclose(self) -> None:
        await self._client.close()


def piece_of(delta: Delta | AnswerDelta) -> Piece:
    receipt, usage = None, delta.usage
    if delta.receipt is not None:
        receipt = to_builtins(delta.receipt)
        receipt["fallbacks"] = list(receipt["fallbacks"])  # equal to a receipt read from JSON
    return Piece(
        index=delta.index,
        tokens=len(delta.token_ids),
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        finish_reason=None if delta.finish_reason is None else str(delta.finish_reason),
        logprobs=tuple(x.sampled.logprob for x in delta.logprobs),
        usage=None if usage is None else {name: getattr(usage, name) for name in _COUNTS},
        receipt=receipt,
    )
