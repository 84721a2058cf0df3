"""`pdserve config`: print or check the configuration, or hash an API key."""

from __future__ import annotations

import asyncio
import getpass
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.options import add_command, add_config_options, config_from
from pdserve.cli.serve import flag_words
from pdserve.config import refuse
from pdserve.config.docs import as_yaml
from pdserve.errors import ConfigError
from pdserve.security.keys import hash_key, new_key
from pdserve.types import Role

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers
    from pdserve.config import Config


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "config",
        _run,
        "print or check the configuration, or hash an API key",
        "Check and print a configuration file: the defaults with --config and --set applied, every "
        "key under its description. --check prints only what is wrong, and also has vLLM check "
        "engine arguments. `pdserve config hash-key` reads an API key from standard input "
        "(without echo on a terminal) and prints its hash, for router.tenants.",
    )
    parser.add_argument("action", nargs="?", choices=("print", "hash-key"), default="print")
    parser.add_argument(
        "--new", action="store_true", help="hash-key: make a random key and print it first"
    )
    parser.add_argument("--check", action="store_true", help="check, and print no key")
    add_config_options(parser, {})


def _run(args: argparse.Namespace) -> int:
    if args.check:
        config = config_from(args)
        for key, words in _engine_flags(config).items():
            asyncio.run(_check_engine_flags(key, words))
        sys.stdout.write("the configuration is valid\n")
        return 0
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


def _engine_flags(config: Config) -> dict[str, list[str]]:
    """Return the engine arguments, if any, as flags of `pdserve serve`, by model."""
    if config.worker.engine != "vllm":
        return {}
    found = {}
    for number, pools in enumerate(config.up.models or (config.up,)):
        sections = {"": config.worker.engine_args | getattr(pools, "engine_args", {})}
        sections |= {f"{role}.": getattr(pools, role).engine_args for role in Role}
        pairs = [(role + name, x) for role, args in sections.items() for name, x in args.items()]
        if words := [word for pair in pairs for word in flag_words(*pair)]:
            found[f"up.models[{number}]" if config.up.models else "worker and up"] = words
    return found


async def _check_engine_flags(key: str, words: list[str]) -> None:
    from pdserve.deploy.local.vllm_flags import read_flags

    with tempfile.TemporaryDirectory() as directory:
        try:
            await read_flags(["MODEL", *words], None, Path(directory) / "flags.log")
        except ConfigError as error:
            refuse(f"{key}: engine_args, as flags of vLLM", error.message)
