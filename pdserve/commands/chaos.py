"""`pdserve chaos`: the benchmarks package brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    from benchmarks.chaos.cli import add_options, run

    parser = commands.add_parser("chaos", help="hurt a service and see what its clients notice")
    add_options(parser)
    parser.set_defaults(handler=run)
