"""Entry points: the commands and processes that other packages of ours provide.

pyproject.toml lists them. This package starts them and names none of their modules.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "pdserve.commands"  # functions that add a command to the parser of `pdserve`
PROCESSES = "pdserve.processes"  # modules to run, and functions that a fork server calls


def entry_point(group: str, name: str) -> EntryPoint:
    """Return an entry point. Raises PdserveError if the installed metadata lacks it."""
    for found in entry_points(group=group, name=name):
        return found
    raise PdserveError(
        f"the installed pdserve has no entry point {name!r} in {group!r}: install it again"
    )


def process_command(name: str) -> tuple[str, ...]:
    """Return the command that runs the module of an entry point in this Python."""
    return sys.executable, "-m", entry_point(PROCESSES, name).module
