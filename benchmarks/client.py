"""Streaming clients: any OpenAI-compatible endpoint over HTTP, and pdserve over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from benchmarks.errors import BenchError, TargetError
from pdserve import rpc
from pdserve.client import Client
from pdserve.errors import PdserveError
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pdserve.client import Delta

PROBE_TIMEOUT_S: Final = 30.0
_ERROR_BODY_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind an endpoint; None for what the endpoint does not tell."""

    name: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a stream. `tokens` is None if the endpoint does not tell how many it holds.

    `has_choice` is False for an event that only carries usage or a receipt. `logprobs` are those
    of the sampled tokens.
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
    """A request that is ready to send; `body` is encoded JSON for HTTP, the prompt for gRPC."""

    request_id: str
    model: str
    body: Any
    sampling: SamplingParams = field(default_factory=SamplingParams)
    headers: Mapping[str, str] = field(default_factory=dict)


class Target(Protocol):
    """An endpoint that continues a prompt of token ids by an exact number of tokens."""

    kind: str
    address: str

    async def model(self, name: str | None) -> ServedModel:
        """Return the model called `name`, or the only one. Raises BenchError if there is none."""
        ...

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> Request:
        """Encode one greedy request, so that nothing is encoded while the clock runs."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Piece]:
        """Send a request and yield its stream. Raises TargetError if the endpoint fails it."""
        ...

    async def aclose(self) -> None:
        """Close all connections and the requests on them."""
        ...


class HttpTarget:
    """An OpenAI-compatible server whose `/v1/completions` takes token ids and `ignore_eos`.

    Must be created inside a running loop. `tls` is what aiohttp takes.
    """

    kind = "http"

    def __init__(self, url: str, api_key: str = "", tls: ssl.SSLContext | bool = True) -> None:
        self.address = base_url(url)
        self._session = aiohttp.ClientSession(
            # A limit on connections would turn the open loop into a closed one.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            headers={"Content-Type": "application/json", **dict(rpc.authorization(api_key))},
        )

    async def model(self, name: str | None) -> ServedModel:
        url = f"{self.address}/v1/models"
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get(url) as response:
                response.raise_for_status()
                entries = (await response.json(content_type=None))["data"]
                models = [
                    ServedModel(x["id"], x.get("max_model_len"), x.get("vocab_size"))
                    for x in entries
                ]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise BenchError(
                f"cannot list models at {url}: {reason}; is the server running there?"
            ) from None
        except (KeyError, TypeError, AttributeError):
            raise BenchError(f"{url} did not answer with OpenAI's list of models") from None
        return _pick(models, name)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> Request:
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
        return Request(request_id, model.name, json.dumps(body, separators=(",", ":")).encode())

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        try:
            async with self._session.post(
                f"{self.address}/v1/completions",
                data=request.body,
                headers=request.headers or {"X-Request-Id": request.request_id},
            ) as response:
                if response.status != 200:
                    raw = await response.content.read(_ERROR_BODY_BYTES)
                    raise _refusal(f"HTTP {response.status}", raw)
                if response.content_type != "text/event-stream":
                    for piece in _pieces(await response.json(), 0):
                        yield piece
                    return
                async for piece in read_stream(response.content.iter_any()):
                    yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TargetError(f"connection failed: {error or type(error).__name__}") from None

    async def aclose(self) -> None:
        await self._session.close()


async def read_stream(blocks: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
    """Parse server-sent events of completions. Raises TargetError for an error in the stream, and
    if the stream ends before `[DONE]`."""
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
    """Split one event by choice. `counted` is the last running usage, if the server sends one."""
    usage = event.get("usage")
    found: dict[str, int | None] | None = None
    tokens = None
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details") or {}
        found = {
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "cached_tokens": details.get("cached_tokens"),
        }
        tokens = (found["completion_tokens"] or 0) - counted
    receipt = (event.get("pdserve") or {}).get("receipt")
    choices = event.get("choices") or ()
    if not choices:
        return [Piece(has_choice=False, usage=found, receipt=receipt)]
    pieces = []
    for choice in choices:
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        pieces.append(
            Piece(
                index=choice.get("index", 0),
                tokens=len(ids) if ids is not None else tokens,
                token_ids=tuple(ids or ()),
                text=choice.get("text") or "",
                finish_reason=choice.get("finish_reason"),
                logprobs=tuple(logprobs),
                usage=found,
                receipt=receipt,
            )
        )
    return pieces


def _refusal(what: str, raw: bytes) -> TargetError:
    """Make an error of an OpenAI error object, or of whatever is there instead."""
    text, code = raw.decode(errors="replace").strip(), ""
    try:
        error = json.loads(raw)["error"]
        text, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return TargetError(f"{what}: {text}", code)


class GrpcTarget:
    """pdserve's `Generation` service. Must be created inside a running loop."""

    kind = "grpc"

    def __init__(self, address: str, dialer: rpc.Dialer = rpc.PLAIN, api_key: str = "") -> None:
        if "/" in address or not address.rpartition(":")[2].isdecimal():
            raise BenchError(f"--grpc {address!r} is not like 127.0.0.1:8001")
        self.address = address
        self._client = Client(address, dialer=dialer, api_key=api_key)

    async def model(self, name: str | None) -> ServedModel:
        try:
            cards = await self._client.list_models(timeout_s=PROBE_TIMEOUT_S)
        except PdserveError as error:
            raise BenchError(
                f"cannot list models at {self.address}: {error}; is pdserve's gRPC API there?"
            ) from None
        models = [ServedModel(x.name, x.max_model_len or None, x.vocab_size or None) for x in cards]
        return _pick(models, name)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> Request:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True
        )
        return Request(request_id, model.name, list(prompt), sampling)

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


def piece_of(delta: Delta) -> Piece:
    """Convert what pdserve's own client yields."""
    receipt = None
    if delta.receipt is not None:
        receipt = asdict(delta.receipt)
        receipt["fallbacks"] = list(receipt["fallbacks"])  # as JSON has it
    return Piece(
        index=delta.index,
        tokens=len(delta.token_ids),
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        finish_reason=None if delta.finish_reason is None else str(delta.finish_reason),
        logprobs=tuple(x.sampled.logprob for x in delta.logprobs),
        usage=None if delta.usage is None else asdict(delta.usage),
        receipt=receipt,
    )


class RoundRobin:
    """Several addresses of one service, such as its routers. Sends each request to the next."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.kind = targets[0].kind
        self.address = ",".join(target.address for target in targets)
        self._targets = targets
        self._next = itertools.cycle(targets)

    async def model(self, name: str | None) -> ServedModel:
        found = [await target.model(name) for target in self._targets]
        for target, model in zip(self._targets, found, strict=True):
            if model != found[0]:
                raise BenchError(f"{target.address} serves {model}, not {found[0]} as the others")
        return found[0]

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> Request:
        return self._targets[0].prepare(model, request_id, prompt, output_tokens)

    def stream(self, request: Request) -> AsyncIterator[Piece]:
        return next(self._next).stream(request)

    async def aclose(self) -> None:
        for target in self._targets:
            await target.aclose()


def open_http(urls: str, api_key: str = "", tls: ssl.SSLContext | bool = True) -> Target:
    """Open one URL, or several separated by commas. Raises BenchError."""
    checked = [base_url(url) for url in urls.split(",")]
    targets = [HttpTarget(url, api_key, tls) for url in checked]
    return targets[0] if len(targets) == 1 else RoundRobin(targets)


def open_grpc(addresses: str, dialer: rpc.Dialer = rpc.PLAIN, api_key: str = "") -> Target:
    """Open one HOST:PORT, or several separated by commas. Raises BenchError."""
    targets = [GrpcTarget(address, dialer, api_key) for address in addresses.split(",")]
    return targets[0] if len(targets) == 1 else RoundRobin(targets)


def base_url(url: str) -> str:
    """Remove a trailing slash and `/v1`. Raises BenchError if it is not an HTTP URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise BenchError(f"--url {url!r} is not like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _pick(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    names = ", ".join(model.name for model in models) or "none"
    if name is None and len(models) == 1:
        return models[0]
    for model in models:
        if model.name == name:
            return model
    if name is None:
        raise BenchError(f"choose a model with --model; served: {names}")
    raise BenchError(f"--model {name!r} is not served there; served: {names}")
