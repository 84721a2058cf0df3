"""`pdserve config`: print the configuration, or the hash of an API key."""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING

from pdserve.cli.options import add_command, add_config_options, config_from
from pdserve.config import refuse
from pdserve.config.docs import as_yaml
from pdserve.security.keys import hash_key, new_key

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "config",
        _run,
        "print every configuration key, or hash an API key",
        "Check and print a configuration file: the defaults with --config and --set applied, every "
        "key under its description. `pdserve config hash-key` reads an API key from standard input "
        "(without echo on a terminal) and prints its hash, for router.tenants.",
    )
    parser.add_argument("action", nargs="?", choices=("print", "hash-key"), default="print")
    parser.add_argument(
        "--new", action="store_true", help="hash-key: make a random key and print it first"
    )
    add_config_options(parser, {})


def _run(args: argparse.Namespace) -> int:
    if args.action == "print":
        sys.stdout.write(as_yaml(config_from(args)))
        return 0
    if args.new:
        key = new_key()
        sys.stdout.write(f"{key}\n")
    else:
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
        key = key.strip()
        if not key:
            refuse("key", "must not be empty")
    sys.stdout.write(f"{hash_key(key)}\n")
    return 0
