"""What a run of the matrix found, and the file that keeps it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCHEMA: Final = "pdserve.chaos/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One fault. ``failed`` counts the requests that failed and had no excuse, ``excused`` those
    that its fault itself ends (a client that breaks off, the streams of the router that is
    killed). ``pause_s`` is the longest that any answer made its client wait, ``whole_s`` the time
    from the fault to a service that is whole again. ``fallbacks`` by step and reason."""

    name: str
    what: str
    hit: bool
    requests: int
    failed: int
    excused: int
    wrong_tokens: int
    leaked_blocks: int
    left: Sequence[str]
    pause_s: float
    whole_s: float
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    errors: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Nothing lost, nothing wrong, nothing left, and the fault took place."""
        bad = self.failed or self.wrong_tokens or self.leaked_blocks or self.left
        return self.hit and not bad


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixResult:
    """One run, or several of one kind. ``left`` is what the service left behind when it stopped."""

    created: str
    engine: str
    workers: str
    model: str
    trace: str
    host: Mapping[str, object]
    settings: Mapping[str, object]
    rows: Sequence[RowResult]
    left: Sequence[str] = ()
    runs: int = 1

    @property
    def passed(self) -> bool:
        """Every row, and the end."""
        return all(row.passed for row in self.rows) and not self.left


def joined(results: Sequence[MatrixResult]) -> MatrixResult:
    """The rows of runs that are alike; of one that several have, the last's. Raises
    :class:`BenchError` where they differ in what was asked, or of what."""
    first = results[0]
    for name in ("engine", "workers", "model", "trace", "host", "settings"):
        for other in results[1:]:
            if getattr(other, name) != getattr(first, name):
                raise BenchError(f"the runs differ in {name}")
    rows = {row.name: row for result in results for row in result.rows}
    return replace(
        first,
        created=max(result.created for result in results),
        rows=[*rows.values()],
        left=[text for result in results for text in result.left],
        runs=sum(result.runs for result in results),
    )


def host() -> dict[str, object]:
    """What is said of the machine."""
    return {"cores": len(os.sched_getaffinity(0)), "system": f"Linux {platform.machine()}"}


def to_json(result: MatrixResult) -> str:
    """The whole of it."""
    rows = [{**asdict(row), "passed": row.passed} for row in result.rows]
    plain = {**asdict(result), "rows": rows, "passed": result.passed}
    return json.dumps({"schema": SCHEMA, **plain}, indent=1) + "\n"


def from_json(text: str) -> MatrixResult:
    """Raises :class:`BenchError`."""
    try:
        plain: dict[str, Any] = json.loads(text)
        if plain.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        del plain["passed"]
        rows = plain.pop("rows")
        for row in rows:
            del row["passed"]
        return MatrixResult(**plain, rows=[RowResult(**row) for row in rows])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"not a result of pdserve chaos ({SCHEMA}): {error}") from None


def read(path: Path) -> MatrixResult:
    """Raises :class:`BenchError`."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
