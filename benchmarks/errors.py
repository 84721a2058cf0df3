"""Errors of the benchmarks, with messages for the user, and exit statuses."""

from __future__ import annotations

OK, FAILED, BAD_INPUT, INVALID, INTERRUPTED = 0, 1, 2, 3, 130


class BenchError(Exception):
    """The benchmark cannot run because of a wrong option, trace, endpoint or result file."""


class WarmupFailed(BenchError):
    """A request sent before the measurement failed."""


class TargetError(Exception):
    """One request failed. `code` is the service's error code, or "" without one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class MeasurementFailed(BenchError):
    """The measured part does not work."""
