"""`pdserve hash-key`."""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING

from pdserve.api_keys import hash_key, new_key
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "hash-key",
        help="make an API key, or hash one, for router.tenants",
        description="Print the hash of an API key, as `keys` of a tenant in the configuration "
        "takes it. The key is read from standard input, or from the terminal without echo.",
    )
    parser.add_argument(
        "--new", action="store_true", help="make a random key, and print it before its hash"
    )
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    if args.new:
        key = new_key()
        sys.stdout.write(f"{key}\n")
    else:
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
        key = key.strip()
        if not key:
            refuse("key", "is empty")
    sys.stdout.write(f"{hash_key(key)}\n")
    return 0
