"""`pdserve chat` and `pdserve generate`: ask a running service over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from msgspec import to_builtins

from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    api_key_from,
    dialer_from,
)
from pdserve.errors import PdserveError, Unavailable
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncGenerator

    from rich.console import Console

    from pdserve.cli.options import Subparsers
    from pdserve.client import Delta
    from pdserve.model.tokenizer import ChatMessage
    from pdserve.types import Receipt

_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "maximum tokens of the answer (default: the service's)"),
    "temperature": (float, "0 always takes the likeliest token (default: 1)"),
    "top_p": (float, "sample from the likeliest tokens that sum to this probability"),
    "top_k": (int, "sample from this many tokens"),
    "seed": (int, "make sampling repeatable"),
}
_HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer."


def register(commands: Subparsers) -> None:
    chat = add_command(
        commands,
        "chat",
        _chat,
        "talk to a running service",
        f"Talk to the model; each line is a turn. {_HELP}",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    generate = add_command(
        commands, "generate", _generate, "ask one question and stream the answer"
    )
    generate.add_argument("prompt", help="the question; - reads it from standard input")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text without the chat template"
    )
    for parser in (chat, generate):
        parser.add_argument(
            "--receipt", action="store_true", help="also print the time of each phase of the answer"
        )
        parser.add_argument("--model", default="", help="served model (default: the only one)")
        add_seconds(parser, "--timeout", None, "deadline (default: the router's)")
        sampling = parser.add_argument_group("sampling")
        for name, (kind, text) in _SAMPLING.items():
            flag = f"--{name.replace('_', '-')}"
            sampling.add_argument(flag, type=kind, metavar="N", help=text)
    add_service_options(chat, several=True, as_json="")
    add_service_options(
        generate, several=True, as_json="print text, finish reason, usage and receipt as JSON"
    )


async def _ask(
    args: argparse.Namespace, prompt: str | list[ChatMessage], *, show: bool = True
) -> dict[str, Any]:
    """Stream an answer to standard output if `show`. Return text, finish reason, usage and receipt.
    Raises PdserveError."""
    from pdserve.client import Client

    sampling = {name: x for name in _SAMPLING if (x := getattr(args, name)) is not None}
    answer: dict[str, Any] = {"text": "", "finish_reason": None, "usage": None, "receipt": None}
    access: dict[str, Any] = {"api_key": api_key_from(args), "dialer": dialer_from(args)}
    async with Client(args.grpc.split(","), **access) as client:
        deltas = client.generate(
            prompt,
            SamplingParams(**sampling),
            fill_context=args.max_tokens is None,
            model=args.model,
            timeout_s=args.timeout,
        )
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            async for delta in deltas:
                if show:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                answer["text"] += delta.text
                for name in ("finish_reason", "usage", "receipt"):
                    if (value := getattr(delta, name)) is not None:
                        answer[name] = value
    if show:
        sys.stdout.write("\n")
    return answer


def _generate(args: argparse.Namespace) -> int:
    from pdserve.model.tokenizer import ChatMessage

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = text if args.raw else [ChatMessage("user", text)]
    answer = asyncio.run(_ask(args, prompt, show=not args.json))
    if args.json:
        sys.stdout.write(json.dumps(answer, indent=2, default=to_builtins) + "\n")
    elif args.receipt and answer["receipt"]:
        sys.stderr.write(_receipt_line(answer["receipt"]) + "\n")
    return 0


def _chat(args: argparse.Namespace) -> int:
    from rich.console import Console

    from pdserve.model.tokenizer import ChatMessage

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if console.is_terminal:
        # Line editing and history, if the interpreter was built with them.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        console.print(_HELP, style="dim")
    messages = start = [] if args.system is None else [ChatMessage("system", args.system)]
    while True:
        try:
            line = input("> " if console.is_terminal else "").strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            messages = start
        elif line == "/help":
            console.print(_HELP, style="dim")
        elif line:
            asked = [*messages, ChatMessage("user", line)]
            answer = _answer(args, console, asked)
            if answer is not None:
                messages = [*asked, ChatMessage("assistant", answer)]


def _answer(args: argparse.Namespace, console: Console, messages: list[ChatMessage]) -> str | None:
    """Stream an answer and return it, or None if it was stopped or rejected."""
    try:
        answer = asyncio.run(_ask(args, messages))
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        return None
    except Unavailable:
        raise
    except PdserveError as error:
        console.print(f"\nrejected: {error.message}", style="red")
        return None
    if args.receipt and answer["receipt"]:
        console.print(_receipt_line(answer["receipt"]), style="dim")
    return str(answer["text"])


def _receipt_line(receipt: Receipt) -> str:
    parts = [f"queued {receipt.queue_s * 1000:.1f} ms"]
    if receipt.fetched_tokens:
        took = f"{receipt.fetch_s * 1000:.1f} ms"
        parts.append(f"{receipt.fetched_tokens} tokens of {receipt.fetched_from} copied in {took}")
    parts.append(f"prefill {receipt.prefill_s * 1000:.1f} ms on {receipt.prefill_worker}")
    if receipt.transfer_blocks:
        moved = f"{receipt.transfer_blocks} blocks ({receipt.transfer_bytes / 1024:.0f} KiB)"
        took = f"{receipt.transfer_s * 1000:.1f} ms"
        parts.append(f"{moved} moved in {took} over {receipt.transport}")
    parts.append(f"decode {receipt.decode_s * 1000:.1f} ms on {receipt.decode_worker}")
    if receipt.cost is not None:
        parts.append(f"cost {receipt.cost:.3g}")
    if receipt.energy_j is not None:
        parts.append(f"{receipt.energy_j:.3g} J")
    parts += [f"retry {name}" for name in receipt.fallbacks]
    return ", ".join(parts)
