"""Errors of the benchmarks, with messages for the person at the terminal, and exit statuses."""

from __future__ import annotations

OK, FAILED, BAD_INPUT, INVALID, INTERRUPTED = 0, 1, 2, 3, 130


class BenchError(Exception):
    """The benchmark cannot run as asked: a wrong option, trace, endpoint or result file."""


class WarmupFailed(BenchError):
    """A request sent before the measurement failed."""


class TargetError(Exception):
    """One request failed. `code` is the service's name for the error, "" if it gave none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
