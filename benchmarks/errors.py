"""Errors of the benchmarks, with messages for the person at the terminal."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot run as asked: a wrong option, trace, endpoint or result file."""


class TraceError(BenchError):
    """A trace file is malformed. The message names the file, the line and the field."""

    def __init__(self, path: object, message: str, line: int = 0, field: str = "") -> None:
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: {field}: {message}" if field else f"{where}: {message}")


class WarmupFailed(BenchError):
    """A request sent before the measurement failed."""


class TargetError(Exception):
    """One request failed. `code` is the service's name for the error, "" if it gave none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
