"""Readers of trace files, one a format; every fault is refused with its line and field.

Azure's CSV and Mooncake's JSON lines are described where they are published:
https://github.com/Azure/AzurePublicDataset and https://github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from benchmarks.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

AZURE_HEADER: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSONL_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids", "session_id")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``arrival_s`` counts from the first request. ``hash_ids`` has one id for each block of input
    tokens, or is None where the trace does not say what was shared. ``session_id`` tells sessions
    apart where ids mean something only within one.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a trace file, and how to refuse it."""

    path: Path
    number: int
    text: str

    def error(self, message: str, field: str | None = None) -> TraceError:
        return TraceError(self.path, message, line=self.number, field=field)


def read_rows(
    path: Path, text: str, *, file_format: str, block_size: int
) -> tuple[TraceRequest, ...]:
    """Read a trace file's text; arrival times are made to count from the first row.

    Raises :class:`TraceError` for a fault in any row, rows out of order, and a file without rows.
    """
    reader = FORMATS.get(file_format)
    if reader is None:
        raise TraceError(path, f"unknown format {file_format!r}; known are {', '.join(FORMATS)}")
    lines = [
        _Line(path, number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    timed = reader(path, lines)
    if not timed:
        raise TraceError(path, "no requests in it")
    first_s = timed[0][1]
    last_s = first_s
    rows = []
    for line, at_s, row in timed:
        if at_s < last_s:
            raise line.error(
                "earlier than the row before it; sort the file by arrival", "timestamp"
            )
        last_s = at_s
        _check_blocks(line, row, block_size)
        rows.append(
            TraceRequest(
                # Subtracting leaves binary noise far below the 100 ns that any log resolves.
                arrival_s=round(at_s - first_s, 7),
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                hash_ids=row.hash_ids,
                session_id=row.session_id,
            )
        )
    return tuple(rows)


_Timed = list[tuple[_Line, float, TraceRequest]]


def _check_blocks(line: _Line, row: TraceRequest, block_size: int) -> None:
    if row.hash_ids is None:
        return
    blocks = math.ceil(row.input_tokens / block_size)
    if len(row.hash_ids) != blocks:
        raise line.error(
            f"{len(row.hash_ids)} ids for {row.input_tokens} tokens, which are {blocks} blocks of "
            f"{block_size}; if the trace has another block size, say so with --block-size",
            "hash_ids",
        )


def _read_azure(path: Path, lines: list[_Line]) -> _Timed:
    if not lines or tuple(lines[0].text.split(",")) != AZURE_HEADER:
        raise TraceError(path, f"the first line must be {','.join(AZURE_HEADER)}", line=1)
    epoch: datetime | None = None
    rows: _Timed = []
    for line in lines[1:]:
        cells = line.text.split(",")
        if len(cells) != len(AZURE_HEADER):
            raise line.error(f"{len(cells)} columns where {len(AZURE_HEADER)} are due")
        moment, fraction_s = _azure_moment(line, cells[0])
        epoch = moment if epoch is None else epoch
        # Seconds since the first row keep the log's 100 ns, which a float of an epoch would lose.
        at_s = (moment - epoch).total_seconds() + fraction_s
        row = TraceRequest(
            arrival_s=at_s,
            input_tokens=_csv_count(line, AZURE_HEADER[1], cells[1]),
            output_tokens=_csv_count(line, AZURE_HEADER[2], cells[2]),
        )
        rows.append((line, at_s, row))
    return rows


def _azure_moment(line: _Line, cell: str) -> tuple[datetime, float]:
    whole, _, fraction = cell.partition(".")
    try:
        moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007
    except ValueError:
        raise line.error(
            f"{cell!r} is not like 2023-11-16 18:15:46.6805900", AZURE_HEADER[0]
        ) from None
    if fraction and not (fraction.isascii() and fraction.isdigit()):
        raise line.error(f"{cell!r} has a fraction that is not digits", AZURE_HEADER[0])
    return moment, float(f"0.{fraction or 0}")


def _csv_count(line: _Line, field: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdigit()):
        raise line.error(f"{cell!r} is not a whole number", field)
    return _positive(line, field, int(cell))


def _read_jsonl(_path: Path, lines: list[_Line]) -> _Timed:
    rows: _Timed = []
    for line in lines:
        try:
            values = json.loads(line.text)
        except ValueError as error:
            raise line.error(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise line.error("must be a JSON object")
        for key in values:
            if key not in JSONL_FIELDS:
                raise line.error(f"unknown field; known are {', '.join(JSONL_FIELDS)}", key)
        at_s = _timestamp_s(line, values.get("timestamp"))
        row = TraceRequest(
            arrival_s=at_s,
            input_tokens=_json_count(line, "input_length", values),
            output_tokens=_json_count(line, "output_length", values),
            hash_ids=_hash_ids(line, values.get("hash_ids")),
            session_id=_session_id(line, values.get("session_id")),
        )
        rows.append((line, at_s, row))
    return rows


def _timestamp_s(line: _Line, value: object) -> float:
    if value is None:
        raise line.error("missing; every row needs its arrival in milliseconds", "timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise line.error(f"{value!r} is not a number of milliseconds", "timestamp")
    if not (math.isfinite(value) and value >= 0):
        raise line.error(f"{value!r} is not a finite time from 0 up", "timestamp")
    return value / 1000


def _json_count(line: _Line, field: str, values: Mapping[str, object]) -> int:
    value = values.get(field)
    if value is None:
        raise line.error("missing", field)
    if type(value) is not int:
        raise line.error(f"{value!r} is not a whole number", field)
    return _positive(line, field, value)


def _positive(line: _Line, field: str, value: int) -> int:
    if value < 1:
        raise line.error(f"{value} tokens; a request that can be replayed has at least 1", field)
    return value


def _hash_ids(line: _Line, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise line.error("must be a list of whole numbers", "hash_ids")
    return tuple(value)


def _session_id(line: _Line, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise line.error(f"{value!r} is not a string", "session_id")


FORMATS: Final[Mapping[str, Callable[[Path, list[_Line]], _Timed]]] = {
    "azure": _read_azure,
    "mooncake": _read_jsonl,
    "canonical": _read_jsonl,
}
"""Readers by the name of their format. Mooncake's format is canonical as it stands."""
