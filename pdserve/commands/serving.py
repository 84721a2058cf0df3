"""What `pdserve router` and `pdserve worker` have in common: logs, and the tie to `pdserve up`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import TYPE_CHECKING

from pdserve.child import Reports, die_with
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_child_options(parser: argparse.ArgumentParser) -> None:
    """The options with which `pdserve up` ties a process to itself; not for people."""
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


@contextlib.contextmanager
def served_process(args: argparse.Namespace) -> Iterator[Reports]:
    """Tie this process to its parent, where it has one to be tied to, and tell that parent why it
    ends when an error ends it."""
    if args.parent_pid is not None:
        die_with(args.parent_pid)
    reports = Reports(args.report_fd)
    try:
        yield reports
    except ConfigError as error:
        reports.failed(error.message)
        raise
    except Exception as error:
        reports.failed(f"{type(error).__name__}: {error}")
        raise


def set_up_logging(level: str) -> None:
    """Log to stderr from `level` on."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=_LOG_FORMAT)
