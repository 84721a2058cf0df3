"""Traces of other makers: any CSV or JSON lines, by the names of their columns."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from benchmarks.errors import TraceError
from benchmarks.trace import MOONCAKE_BLOCK_SIZE, Trace, TraceMeta
from benchmarks.trace_formats import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TimeUnit = Literal["s", "ms", "us", "ns", "iso"]
TIME_UNITS: Final[tuple[str, ...]] = get_args(TimeUnit)
_MS: Final = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what, and in which unit times are; ``iso`` is a date with a time."""

    timestamp: str
    input_length: str
    output_length: str
    unit: TimeUnit = "s"


def load_columns(path: Path, columns: Columns, *, drop_empty: bool = False) -> Trace:
    """Read a file whose suffix is ``.csv`` or ``.jsonl``.

    ``drop_empty`` leaves out rows without input or output tokens, as logs have of requests that
    failed. Raises :class:`TraceError` with the line and the column at fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(path, f"cannot be read: {error}") from None
    canonical = {
        number: _canonical(path, number, values, columns) for number, values in _rows(path, text)
    }
    if drop_empty:
        canonical = {
            number: x for number, x in canonical.items() if x["input_length"] and x["output_length"]
        }
    first_ms = min((x["timestamp"] for x in canonical.values()), default=0.0)
    # Each row on the line that it came from, so that what is refused is found there.
    lines = [""] * (max(canonical, default=0))
    for number, values in canonical.items():
        lines[number - 1] = json.dumps(values | {"timestamp": values["timestamp"] - first_ms})
    found = read_rows(
        path, "\n".join(lines), file_format="canonical", block_size=MOONCAKE_BLOCK_SIZE
    )
    return Trace(TraceMeta(name=path.stem), found)


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, values by column) of every row."""
    if path.suffix == ".csv":
        reader = csv.DictReader(text.splitlines())
        for values in reader:
            yield reader.line_num, values
        return
    if path.suffix != ".jsonl":
        raise TraceError(path, f"unknown suffix {path.suffix!r}; --columns reads .csv and .jsonl")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                values = json.loads(line)
            except ValueError as error:
                raise TraceError(path, f"not JSON: {error}", line=number) from None
            if not isinstance(values, dict):
                raise TraceError(path, "not a JSON object", line=number)
            yield number, values


def _canonical(path: Path, number: int, values: dict[str, Any], columns: Columns) -> dict[str, Any]:
    def of(name: str) -> Any:
        if values.get(name) is None:
            raise TraceError(path, "missing", line=number, field=name)
        return values[name]

    def refuse(name: str, what: str) -> TraceError:
        return TraceError(path, f"{values[name]!r} is not {what}", line=number, field=name)

    def count(name: str) -> int:
        try:
            found = float(of(name))
        except (TypeError, ValueError):
            found = math.nan
        if not found.is_integer():
            raise refuse(name, "a whole number of tokens")
        return int(found)

    try:
        timestamp = _milliseconds(of(columns.timestamp), columns.unit)
    except (TypeError, ValueError):
        what = "a date with a time" if columns.unit == "iso" else f"a time in {columns.unit}"
        raise refuse(columns.timestamp, what) from None
    return {
        "timestamp": timestamp,
        "input_length": count(columns.input_length),
        "output_length": count(columns.output_length),
    }


def _milliseconds(value: Any, unit: TimeUnit) -> float:
    if unit == "iso":
        return datetime.fromisoformat(value).timestamp() * 1e3
    found = float(value) * _MS[unit]
    if not math.isfinite(found):
        raise ValueError(value)
    return found
