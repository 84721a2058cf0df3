"""`pdserve plan`: the benchmarks package brings it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    from benchmarks.simulation.plan_cli import register as register_plan

    register_plan(commands)
