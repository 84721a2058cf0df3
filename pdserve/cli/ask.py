"""Ask a running service one question, over gRPC or HTTP, and stream the answer."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pdserve.cli.options import (
    add_dial_options,
    add_grpc_option,
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
    """A service: `url` for HTTP, else `grpc` (host:port, several separated by commas)."""

    url: str | None
    grpc: str
    api_key: str = field(default="", repr=False)
    dialer: Dialer = PLAIN
    tls: ssl.SSLContext | bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, or with `text` a plain text to continue."""

    messages: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer. The last ones have finish reason, usage and receipt."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    receipt: Mapping[str, Any] | None = None


def add_ask_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("service")
    where = group.add_mutually_exclusive_group()
    add_grpc_option(where, "HOST:PORT,...")
    where.add_argument("--url", help="use HTTP instead, such as http://127.0.0.1:8000")
    group.add_argument("--model", default="", help="served model (default: the only one)")
    group.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="deadline (default: the router's)"
    )
    sampling = parser.add_argument_group("sampling")
    for flag, (kind, text) in _SAMPLING.items():
        sampling.add_argument(flag, type=kind, metavar="N", help=text)
    add_dial_options(parser)


def target_from(args: argparse.Namespace) -> Target:
    return Target(args.url, args.grpc, api_key_from(args), dialer_from(args), http_tls_from(args))


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given. Raises InvalidRequest naming the field."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in _SAMPLING]
    values = {name: x for name in names if (x := getattr(args, name)) is not None}
    SamplingParams(**values)
    return values


async def ask(target: Target, question: Question) -> AsyncGenerator[Piece, None]:
    """Yield the answer. Raises PdserveError."""
    pieces = _ask_http(target, question) if target.url else _ask_grpc(target, question)
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _ask_grpc(target: Target, question: Question) -> AsyncGenerator[Piece, None]:
    from pdserve.client import Client
    from pdserve.tokenizer import ChatMessage

    chat = [ChatMessage(role, content) for role, content in question.messages]
    prompt: str | Sequence[ChatMessage] = chat if question.text is None else question.text
    addresses = target.grpc.split(",")
    async with Client(addresses, api_key=target.api_key, dialer=target.dialer) as client:
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
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=target.tls),
            timeout=aiohttp.ClientTimeout(total=question.timeout_s),
            read_bufsize=1 << 20,
            headers=dict(authorization(target.api_key)),
        ) as session:
            body = {"model": question.model or await _only_model(session, base), "stream": True}
            body |= {"stream_options": {"include_usage": True}, **question.sampling}
            if question.text is not None:
                path, body["prompt"] = "/v1/completions", question.text
            else:
                path = "/v1/chat/completions"
                body["messages"] = [{"role": r, "content": c} for r, c in question.messages]
            async with session.post(f"{base}{path}", json=body) as response:
                await _raise_for(response)
                async for piece in _read_stream(response):
                    yield piece
    except TimeoutError as error:
        raise Unavailable(f"no answer from {base} within {question.timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise Unavailable(f"no answer from {base}: {error}") from error


async def _only_model(session: aiohttp.ClientSession, base: str) -> str:
    async with session.get(f"{base}/v1/models") as response:
        await _raise_for(response)
        names = [str(model["id"]) for model in (await response.json())["data"]]
    if len(names) != 1:
        what = f"{', '.join(names)}: choose one with --model" if names else "no model now"
        raise Unavailable(f"{base} serves {what}")
    return names[0]


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text()
    try:
        raise _error(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        raise InternalError(f"HTTP status {response.status}: {text[:200]}") from None


def _error(error: Mapping[str, Any]) -> Exception:
    info = ErrorInfo(error.get("code") or "", str(error["message"]), error.get("param") or "")
    return from_info(info)


async def _read_stream(response: aiohttp.ClientResponse) -> AsyncGenerator[Piece, None]:
    """Yield server-sent events, one `data:` line each."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise _error(chunk["error"])
        choice = chunk["choices"][0] if chunk["choices"] else {}
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        receipt = chunk.get("pdserve", {}).get("receipt")
        yield Piece(text, choice.get("finish_reason"), chunk.get("usage"), receipt)
    raise InternalError("the stream ended before [DONE]")


def receipt_line(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as one line."""
    parts = [f"queued {receipt['queue_s'] * 1000:.1f} ms"]
    parts.append(f"prefill {receipt['prefill_s'] * 1000:.1f} ms on {receipt['prefill_worker']}")
    if receipt["transfer_blocks"]:
        moved = f"{receipt['transfer_blocks']} blocks ({receipt['transfer_bytes'] / 1024:.0f} KiB)"
        took = f"{receipt['transfer_s'] * 1000:.1f} ms"
        parts.append(f"{moved} moved in {took} over {receipt['transport']}")
    parts.append(f"decode {receipt['decode_s'] * 1000:.1f} ms on {receipt['decode_worker']}")
    parts += [f"retry {name}" for name in receipt["fallbacks"]]
    return ", ".join(parts)
