"""`pdserve chat`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.commands.asking import (
    Question,
    add_asking_options,
    ask,
    sampling_from,
    target_from,
)
from pdserve.commands.generate import receipt_line
from pdserve.errors import PdserveError, Unavailable

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from pdserve.commands.asking import Target
    from pdserve.commands.options import Subparsers

_HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer."


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running service",
        description=f"Talk to the model, on a terminal or from a pipe, a line a turn. {_HELP}",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--receipt", action="store_true", help="say after each answer what each phase cost"
    )
    add_asking_options(parser)
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    system = () if args.system is None else (("system", args.system),)
    question = Question(
        messages=system,
        model=args.model,
        sampling=sampling_from(args),
        timeout_s=args.timeout,
    )
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        # Line editing and history, where the interpreter was built with them.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        console.print(_HELP, style="dim")
    _converse(console, target_from(args), question, show_receipt=args.receipt)
    return 0


def _converse(console: Console, target: Target, start: Question, *, show_receipt: bool) -> None:
    question = start
    while (line := _read_line(console)) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            question = start
        if not line or line == "/reset":
            continue
        asked = replace(question, messages=(*question.messages, ("user", line)))
        try:
            answer = asyncio.run(_stream(console, target, asked, show_receipt=show_receipt))
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
            continue
        except Unavailable:
            raise
        except PdserveError as error:
            console.print(f"\nrefused: {error.message}", style="red", markup=False)
            continue
        question = replace(asked, messages=(*asked.messages, ("assistant", answer)))


def _read_line(console: Console) -> str | None:
    """The next line, or None at the end of the input."""
    try:
        return input("> " if console.is_terminal else "").strip()
    except EOFError:
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
        console.print(receipt_line(dict(receipt)), style="dim", markup=False)
    return "".join(texts)
