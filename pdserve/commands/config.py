"""`pdserve config`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pdserve.commands.options import add_config_options, config_from
from pdserve.config import as_yaml

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "config",
        help="print the configuration: every key with its meaning",
        description="Print a configuration file with every key under its meaning: at its default, "
        "or as --config and --set leave it, which are checked on the way.",
    )
    add_config_options(parser, {})
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    sys.stdout.write(as_yaml(config_from(args)))
    return 0
