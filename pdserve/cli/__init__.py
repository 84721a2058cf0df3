"""The `pdserve` command: parser, error messages and exit codes.

Commands import what they need when they run, so that `pdserve --help` is quick.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from pdserve import __version__
from pdserve.cli import (
    admin,
    ask,
    capsule,
    checkpoint,
    cluster,
    config,
    explain,
    replay,
    residency,
    scaler,
    serve,
    status,
    top,
    verify,
)
from pdserve.cli.options import CommandParser
from pdserve.config import Config
from pdserve.errors import ClientError, ConfigError, PdserveError, ServiceError
from pdserve.process.entry_points import COMMANDS, entry_point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.cli.options import Handler, Subparsers

# In the order of `pdserve --help`. A name is an entry point: the command of another package.
_COMMANDS: tuple[Callable[[Subparsers], None] | str, ...] = (
    serve.register,
    "router",
    "worker",
    cluster.register_upgrade,
    ask.register,
    status.register,
    top.register,
    explain.register,
    capsule.register,
    replay.register,
    residency.register,
    verify.register,
    admin.register,
    checkpoint.register,
    cluster.register,
    scaler.register,
    config.register,
    "bench",
)
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
exit codes: 0 success, 1 failure, 2 wrong options or configuration, 130 interrupted

first steps:
  pdserve up        serve the demo model on this machine
  pdserve chat      talk to it, from another terminal
  pdserve status    show its workers, their load and their KV blocks
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser. Each command sets `handler`: arguments to exit code, maybe async."""
    parser = CommandParser(
        prog="pdserve",
        description="Prefill/decode disaggregated serving of large language models on vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        register = entry_point(COMMANDS, command).load() if isinstance(command, str) else command
        register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
        handler: Handler = args.handler
        code = handler(args)
        return code if isinstance(code, int) else asyncio.run(code)
    except ConfigError as error:
        is_key = (error.field or "").partition(".")[0] in Config.__struct_fields__
        hint = "\n`pdserve config` prints every key." if is_key else ""
        return _fail(error.message + hint, USAGE)
    except ClientError as error:
        where = f" (field {error.field})" if error.field else ""
        return _fail(f"request rejected: {error.message}{where}", FAILED)
    except ServiceError as error:
        hint = "`pdserve status` shows the state of a service; `pdserve up` starts one."
        return _fail(f"{error.message}\n{hint}", FAILED)
    except PdserveError as error:
        return _fail(error.message, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Avoid a second failure when the interpreter flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"pdserve: {message}\n")
    return code
