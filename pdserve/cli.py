"""The `pdserve` command: the parser, and errors to messages and exit codes.

Subcommands import what they need when they run, so that `pdserve --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from pdserve import __version__
from pdserve.commands import (
    bench,
    chat,
    config,
    drain,
    explain,
    flip,
    generate,
    hash_key,
    router,
    status,
    top,
    up,
    worker,
)
from pdserve.errors import ClientError, ConfigError, PdserveError, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COMMANDS = (
    up,
    router,
    worker,
    generate,
    chat,
    status,
    top,
    explain,
    flip,
    drain,
    config,
    hash_key,
    bench,
)
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_DESCRIPTION = "Prefill/decode disaggregated serving of large language models on vLLM."
_EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong options or configuration, 130 interrupted

first steps:
  pdserve up                     serve the demo model on this machine
  pdserve chat                   talk to it, from another terminal
  pdserve status                 see its workers, their load and their KV blocks
  pdserve top                    watch it work
"""
_HINT = "`pdserve status` shows the state of a service; `pdserve up` starts one."


def build_parser() -> argparse.ArgumentParser:
    """The whole parser. Each command sets `handler`, from the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="pdserve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    handler: Callable[[argparse.Namespace], int] = args.handler
    try:
        return handler(args)
    except ConfigError as error:
        return _say(f"{error.message}\n`pdserve config` prints every key with its default.", USAGE)
    except ClientError as error:
        where = f" (field {error.field})" if error.field else ""
        return _say(f"the request was refused: {error.message}{where}", FAILED)
    except ServiceError as error:
        return _say(f"{error.message}\n{_HINT}", FAILED)
    except PdserveError as error:
        return _say(error.message, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; a second failure at exit is spared.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"pdserve: {message}\n")
    return code
