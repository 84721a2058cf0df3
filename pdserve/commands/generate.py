"""`pdserve generate`."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pdserve.commands.asking import (
    Question,
    add_asking_options,
    ask,
    sampling_from,
    target_from,
)

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.asking import Target
    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        help="ask one question of a running service and stream the answer",
        description="Ask one question and print the answer as it is made.",
    )
    parser.add_argument("prompt", help="the question; - reads it from standard input")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="go on with the text as it stands, without the model's chat template",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end: text, finish reason, usage and receipt",
    )
    parser.add_argument(
        "--receipt", action="store_true", help="say on standard error what each phase cost"
    )
    add_asking_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    question = Question(
        messages=() if args.raw else (("user", prompt),),
        text=prompt if args.raw else None,
        model=args.model,
        sampling=sampling_from(args),
        timeout_s=args.timeout,
    )
    answer = asyncio.run(_stream(target_from(args), question, quiet=args.json))
    if args.json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    elif args.receipt and answer["receipt"] is not None:
        sys.stderr.write(receipt_line(answer["receipt"]) + "\n")
    return 0


async def _stream(target: Target, question: Question, *, quiet: bool) -> dict[str, Any]:
    """Print the text as it comes, unless `quiet`; the whole answer at its end."""
    texts: list[str] = []
    answer: dict[str, Any] = {"text": "", "finish_reason": None, "usage": None, "receipt": None}
    pieces = ask(target, question)
    async with aclosing(pieces):
        async for piece in pieces:
            texts.append(piece.text)
            for name in ("finish_reason", "usage", "receipt"):
                answer[name] = getattr(piece, name) or answer[name]
            if not quiet:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
    answer["text"] = "".join(texts)
    return answer


def receipt_line(receipt: dict[str, Any]) -> str:
    """A receipt in one line."""
    parts = [f"queued {receipt['queue_s'] * 1000:.1f} ms"]
    parts.append(f"prefill {receipt['prefill_s'] * 1000:.1f} ms on {receipt['prefill_worker']}")
    if receipt["transfer_blocks"]:
        moved = f"{receipt['transfer_blocks']} blocks ({receipt['transfer_bytes'] / 1024:.0f} KiB)"
        took = f"{receipt['transfer_s'] * 1000:.1f} ms"
        parts.append(f"{moved} moved in {took} over {receipt['transport']}")
    parts.append(f"decode {receipt['decode_s'] * 1000:.1f} ms on {receipt['decode_worker']}")
    parts += [f"fallback {name}" for name in receipt["fallbacks"]]
    return ", ".join(parts)
