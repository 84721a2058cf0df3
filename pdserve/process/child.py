"""The child's side of a router or worker process of `pdserve up`, which reports its start and then
serves the network. Processes that answer calls of their parent are child_pool.py's."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Signal to a worker that was started with `worker.warm`: accept requests from now on.
TAKE_REQUESTS = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


class Reports:
    """Writes start-up progress to `fd` as JSON lines: {"doing": text}, {"ready": facts} or
    {"failed": text}. Without `fd`, calls have no effect."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def doing(self, what: str) -> None:
        self._write({"doing": what})

    def ready(self, facts: Mapping[str, object]) -> None:
        self._write({"ready": dict(facts)})

    def failed(self, why: str) -> None:
        self._write({"failed": why})

    def _write(self, line: Mapping[str, object]) -> None:
        # A broken pipe means that the parent is gone. The kernel then kills this process too.
        with contextlib.suppress(BrokenPipeError):
            if self._fd is not None:
                os.write(self._fd, json.dumps(line).encode() + b"\n")


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux only). Exit if the parent is
    no longer `parent_pid`, because it may have ended before the call; 0 accepts any parent."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # Check after prctl, because no signal is sent for a parent that ended before the call.
    if parent_pid and os.getppid() != parent_pid:
        sys.exit(1)


def exit_at_once(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes seconds with torch."""
    # Like a normal exit, first wait for non-daemon threads and run the atexit handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def add_child_options(parser: argparse.ArgumentParser) -> None:
    """Add the hidden options that `pdserve up` passes."""
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


@contextlib.contextmanager
def served_process(args: argparse.Namespace) -> Iterator[Reports]:
    """Tie this process to its parent, if it has one. Yield the reports to it. An error that ends
    the process is reported."""
    if args.parent_pid is not None:
        die_with(args.parent_pid)
    reports = Reports(args.report_fd)
    try:
        yield reports
    except Exception as error:
        is_expected = isinstance(error, ConfigError)
        reports.failed(str(error) if is_expected else f"{type(error).__name__}: {error}")
        raise
