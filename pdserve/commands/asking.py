"""One question to a running service, over gRPC or HTTP, and its answer piece by piece."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pdserve.commands.options import (
    DEFAULT_GRPC,
    add_dial_options,
    api_key_from,
    dialer_from,
    http_tls_from,
)
from pdserve.errors import InternalError, Unavailable, from_info
from pdserve.rpc import PLAIN
from pdserve.types import ErrorInfo, SamplingParams

if TYPE_CHECKING:
    import argparse
    import ssl
    from collections.abc import AsyncGenerator, Mapping, Sequence

    import aiohttp

    from pdserve.client import Delta
    from pdserve.rpc import Dialer

_SAMPLING: dict[str, tuple[type, str]] = {
    "--max-tokens": (int, "most tokens of the answer (default: the service's)"),
    "--temperature": (float, "0 always takes the likeliest token (default: 1)"),
    "--top-p": (float, "sample from the likeliest tokens that sum to this probability"),
    "--top-k": (int, "sample from this many tokens"),
    "--seed": (int, "make sampling repeatable"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask: `url` for HTTP, `grpc` (host:port, or several with commas) for gRPC."""

    url: str | None
    grpc: str
    api_key: str = field(default="", repr=False)
    dialer: Dialer = PLAIN
    tls: ssl.SSLContext | bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, or with `text` a plain text to go on with. `sampling` has what was set."""

    messages: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer; the last one has the rest."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    receipt: Mapping[str, Any] | None = None


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Where to ask, and how to sample."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT,...",
        help="the router's gRPC address; with those of several an answer goes on where one of them "
        "is lost (default: %(default)s)",
    )
    where.add_argument("--url", help="ask over HTTP instead, such as http://127.0.0.1:8000")
    add_dial_options(parser)
    parser.add_argument("--model", default="", help="served model (default: the only one)")
    for flag, (kind, text) in _SAMPLING.items():
        parser.add_argument(flag, type=kind, metavar="N", help=text)
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="deadline (default: the router's)"
    )


def target_from(args: argparse.Namespace) -> Target:
    """Where the options say to ask."""
    return Target(args.url, args.grpc, api_key_from(args), dialer_from(args), http_tls_from(args))


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were set. Raises InvalidRequest naming the field."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in _SAMPLING]
    values = {name: x for name in names if (x := getattr(args, name)) is not None}
    SamplingParams(**values)
    return values


async def ask(target: Target, question: Question) -> AsyncGenerator[Piece, None]:
    """The answer. Raises PdserveError."""
    pieces = _ask_http(target, question) if target.url else _ask_grpc(target, question)
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _ask_grpc(target: Target, question: Question) -> AsyncGenerator[Piece, None]:
    from pdserve.client import Client
    from pdserve.tokenizer import ChatMessage

    chat = [ChatMessage(role, content) for role, content in question.messages]
    prompt: str | Sequence[ChatMessage] = chat if question.text is None else question.text
    async with Client(
        target.grpc.split(","), api_key=target.api_key, dialer=target.dialer
    ) as client:
        deltas = client.generate(
            prompt,
            SamplingParams(**question.sampling),
            fill_context="max_tokens" not in question.sampling,
            model=question.model,
            timeout_s=question.timeout_s,
        )
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                yield Piece(
                    delta.text,
                    None if delta.finish_reason is None else str(delta.finish_reason),
                    None if delta.usage is None else asdict(delta.usage),
                    None if delta.receipt is None else asdict(delta.receipt),
                )


async def _ask_http(target: Target, question: Question) -> AsyncGenerator[Piece, None]:
    import aiohttp

    from pdserve.rpc import authorization

    assert target.url is not None
    base = target.url.rstrip("/").removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=question.timeout_s)
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=target.tls),
            timeout=timeout,
            read_bufsize=1 << 20,
            headers=dict(authorization(target.api_key)),
        ) as session:
            path, body = _body(question, question.model or await _only_model(session, base))
            async with session.post(f"{base}{path}", json=body) as response:
                await _raise_for(response)
                async for piece in _read_stream(response):
                    yield piece
    except TimeoutError as error:
        raise Unavailable(f"no answer from {base} within {question.timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise Unavailable(f"no answer from {base}: {error}") from error


def _body(question: Question, model: str) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": model, "stream": True, **question.sampling}
    body["stream_options"] = {"include_usage": True}
    if question.text is not None:
        return "/v1/completions", {**body, "prompt": question.text}
    messages = [{"role": role, "content": content} for role, content in question.messages]
    return "/v1/chat/completions", {**body, "messages": messages}


async def _only_model(session: aiohttp.ClientSession, base: str) -> str:
    async with session.get(f"{base}/v1/models") as response:
        await _raise_for(response)
        names = [model["id"] for model in (await response.json())["data"]]
    if not names:
        raise Unavailable(f"{base} serves no model now")
    if len(names) > 1:
        raise Unavailable(f"{base} serves {', '.join(names)}: choose one with --model")
    return str(names[0])


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text()
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"code": "", "message": f"HTTP status {response.status}: {text[:200]}"}
    raise _error(error)


def _error(error: Mapping[str, Any]) -> Exception:
    info = ErrorInfo(error.get("code") or "", str(error["message"]), error.get("param") or "")
    return from_info(info)


async def _read_stream(response: aiohttp.ClientResponse) -> AsyncGenerator[Piece, None]:
    """Server-sent events, one `data:` line each, as the OpenAI API sends them."""
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _error(chunk["error"])
        yield _piece(chunk)
    raise InternalError("the stream broke off before its end")


def _piece(chunk: Mapping[str, Any]) -> Piece:
    choice = chunk["choices"][0] if chunk["choices"] else {}
    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
    receipt = chunk.get("pdserve", {}).get("receipt")
    return Piece(text, choice.get("finish_reason"), chunk.get("usage"), receipt)
