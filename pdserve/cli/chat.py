"""`pdserve chat`: a conversation, on a terminal or from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.cli.ask import (
    Question,
    add_ask_options,
    ask,
    receipt_line,
    sampling_from,
    target_from,
)
from pdserve.cli.options import formatter
from pdserve.errors import PdserveError, Unavailable

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from pdserve.cli.ask import Target
    from pdserve.cli.options import Subparsers

_HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer."


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a running service",
        description=f"Talk to the model; each line is a turn. {_HELP}",
        formatter_class=formatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--receipt", action="store_true", help="print the cost of each phase after each answer"
    )
    add_ask_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    start = Question(
        messages=() if args.system is None else (("system", args.system),),
        model=args.model,
        sampling=sampling_from(args),
        timeout_s=args.timeout,
    )
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        # Line editing and history, if the interpreter was built with them.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        console.print(_HELP, style="dim")
    target, question = target_from(args), start
    while (line := _read_line(console)) is not None and line != "/quit":
        if line == "/reset":
            question = start
        elif line:
            asked = replace(question, messages=(*question.messages, ("user", line)))
            answer = _answer(console, target, asked, show_receipt=args.receipt)
            if answer is not None:
                question = replace(asked, messages=(*asked.messages, ("assistant", answer)))
    return 0


def _read_line(console: Console) -> str | None:
    try:
        return input("> " if console.is_terminal else "").strip()
    except EOFError:
        return None


def _answer(
    console: Console, target: Target, question: Question, *, show_receipt: bool
) -> str | None:
    """Stream an answer and return it, or None if it was stopped or rejected."""
    try:
        return asyncio.run(_stream(console, target, question, show_receipt=show_receipt))
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except Unavailable:
        raise
    except PdserveError as error:
        console.print(f"\nrejected: {error.message}", style="red", markup=False)
    return None


async def _stream(
    console: Console, target: Target, question: Question, *, show_receipt: bool
) -> str:
    texts: list[str] = []
    receipt = None
    pieces = ask(target, question)
    async with aclosing(pieces):
        async for piece in pieces:
            texts.append(piece.text)
            receipt = piece.receipt or receipt
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    if show_receipt and receipt is not None:
        console.print(receipt_line(receipt), style="dim", markup=False)
    return "".join(texts)
