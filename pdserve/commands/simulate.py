"""`pdserve simulate`: the benchmarks package brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    from benchmarks.simulation.cli import register as register_simulate

    register_simulate(commands)
