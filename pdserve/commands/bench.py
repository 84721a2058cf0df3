"""`pdserve bench`: the benchmarks package brings its own commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    from benchmarks.cli import register as register_benchmarks

    register_benchmarks(commands)
