"""What the benchmarks refuse, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class BenchError(Exception):
    """Bad input to a benchmark; the message says what is wrong and what to do."""


class TraceError(BenchError):
    """A trace file that cannot be read as one, with the place in it.

    ``line`` counts from 1; it is None where the file as a whole is wrong, and ``field`` is None
    where a whole line is.
    """

    def __init__(
        self, path: Path, message: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        self.path = path
        self.line = line
        self.field = field
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {message}" if field is None else f"{place}: {field}: {message}")


class WarmupFailed(BenchError):
    """The endpoint failed a request before anything was measured."""


class TargetError(Exception):
    """A request that its endpoint refused, broke off, or answered with the wrong length."""
