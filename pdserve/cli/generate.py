"""`pdserve generate`: one question, one answer."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pdserve.cli.ask import (
    Question,
    add_ask_options,
    ask,
    receipt_line,
    sampling_from,
    target_from,
)
from pdserve.cli.options import formatter

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.ask import Target
    from pdserve.cli.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="ask one question and stream the answer",
        description="Ask one question and stream the answer.",
        formatter_class=formatter,
    )
    parser.add_argument("prompt", help="the question; - reads it from standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text without the chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print text, finish reason, usage and receipt as JSON"
    )
    parser.add_argument(
        "--receipt", action="store_true", help="print the cost of each phase to standard error"
    )
    add_ask_options(parser)
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
    answer: dict[str, Any] = {"text": "", "finish_reason": None, "usage": None, "receipt": None}
    pieces = ask(target, question)
    async with aclosing(pieces):
        async for piece in pieces:
            answer["text"] += piece.text
            for name in ("finish_reason", "usage", "receipt"):
                answer[name] = getattr(piece, name) or answer[name]
            if not quiet:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
    return answer
