"""Traces: when requests arrived and how long they were.

Formats, recognised by suffix and header:

azure     CSV of https://github.com/Azure/AzurePublicDataset
burstgpt  CSV of https://github.com/HPMLL/BurstGPT
mooncake  JSON lines of https://github.com/kvcache-ai/Mooncake; `timestamp` in milliseconds, and
          optionally `hash_ids`, one for each block of input tokens: two requests share as long a
          prefix as their ids agree. Other fields are ignored.

`NAME.meta.json` beside a trace may give `name`, `block_size` (tokens per hash id, default 512),
`tick_s` (the step that the log rounded its times to), `source`, `licence` and `attribution`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.errors import BenchError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TickJitter = Literal["none", "uniform", "even"]
TRACES_DIR: Final = Path(__file__).parent / "traces"
NAMED_TRACES: Final[Mapping[str, str]] = {
    "chat": "azure-llm-2023/AzureLLMInferenceTrace_conv.first10000.csv",
    "code": "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
    "longchat": "mooncake-fast25/conversation_trace.first4000.jsonl",
}
# Format: columns of arrival, input and output.
CSV_FORMATS: Final = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
BLOCK_SIZE: Final = 512  # of Mooncake's files


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrival_s` counts from the first; `hash_ids` is None if the trace has none."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """What is known of a trace besides its rows."""

    name: str
    format: str
    block_size: int | None = None
    tick_s: float | None = None
    source: str = ""
    licence: str = ""
    attribution: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `ignored` names fields that were in the file but not used."""

    meta: TraceMeta
    requests: tuple[TraceRequest, ...]
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def digest(self) -> str:
        """Return a SHA-256 of lengths and prefix ids; it keys the prompts."""
        whole = hashlib.sha256()
        for row in self.requests:
            ids = "-" if row.hash_ids is None else ",".join(map(str, row.hash_ids))
            whole.update(f"{row.input_tokens} {row.output_tokens} {ids}\n".encode())
        return whole.hexdigest()


def load_trace(name_or_path: str) -> Trace:
    """Read a shipped trace by name, a file by path, or several joined by `+` at equal rates.

    Raises BenchError for an unknown name and TraceError for a malformed file.
    """
    parts = name_or_path.split("+")
    if len(parts) > 1 and not Path(name_or_path).exists():
        return _mixed([load_trace(part) for part in parts])
    if name_or_path in NAMED_TRACES:
        path = TRACES_DIR / NAMED_TRACES[name_or_path]
    else:
        path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(NAMED_TRACES)
        raise BenchError(f"no trace {name_or_path!r}: give one of {names}, or the path of a file")
    meta = _read_meta(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(path, f"cannot be read: {error}") from None
    read = _read_csv if path.suffix == ".csv" else _read_mooncake
    format_name, rows, ignored = read(path, text)
    if not rows:
        raise TraceError(path, "no requests in it")
    rows = _in_order(path, rows)
    if any(row.hash_ids is not None for row in rows):
        meta.setdefault("block_size", BLOCK_SIZE)
        _check_blocks(path, rows, meta["block_size"])
    else:
        meta.pop("block_size", None)
    meta.setdefault("tick_s", infer_tick_s(rows))
    meta.setdefault("name", path.stem)
    return Trace(TraceMeta(format=format_name, **meta), rows, ignored)


def infer_tick_s(rows: Sequence[TraceRequest]) -> float | None:
    """Return the step that arrival times were rounded to, or None if they were not rounded.

    A log is rounded if most of its requests share their arrival time with another one.
    """
    distinct = sorted({row.arrival_s for row in rows})
    if len(distinct) < 2 or 2 * len(distinct) > len(rows):
        return None
    gaps = sorted(later - earlier for earlier, later in pairwise(distinct))
    return gaps[len(gaps) // 2]


_Rows = tuple[TraceRequest, ...]


def _read_csv(path: Path, text: str) -> tuple[str, _Rows, tuple[str, ...]]:
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or ()
    name = next((x for x, columns in CSV_FORMATS.items() if set(columns) <= set(header)), None)
    if name is None:
        known = "; ".join(f"{name}: {', '.join(x)}" for name, x in CSV_FORMATS.items())
        raise TraceError(path, f"its columns are of no known format ({known})", line=1)
    columns = at, given, made = CSV_FORMATS[name]
    rows = []
    epoch: datetime | None = None
    for number, values in enumerate(reader, start=2):

        def refuse(column: str, what: str, number: int = number) -> TraceError:
            return TraceError(path, what, line=number, field=column)

        if name == "azure":
            moment, fraction_s = _moment(values[at], refuse)
            epoch = epoch or moment
            # Seconds since the first row keep the log's 100 ns; a float epoch would not.
            at_s = (moment - epoch).total_seconds() + fraction_s
        else:
            at_s = _number(values[at], at, refuse)
        lengths = [int(_number(values[x], x, refuse)) for x in (given, made)]
        if name == "burstgpt" and min(lengths) < 1:
            continue  # a request that failed there
        for column, length in zip((given, made), lengths, strict=True):
            if length < 1:
                raise refuse(column, f"{length} tokens; at least 1 is needed")
        rows.append(TraceRequest(at_s, lengths[0], lengths[1]))
    return name, tuple(rows), tuple(x for x in header if x not in columns)


def _moment(cell: str, refuse: Callable[[str, str], TraceError]) -> tuple[datetime, float]:
    whole, _, fraction = cell.partition(".")
    try:
        return datetime.fromisoformat(whole), float(f"0.{fraction or 0}")
    except ValueError:
        raise refuse("TIMESTAMP", f"{cell!r} is not like 2023-11-16 18:15:46.6805900") from None


def _number(cell: object, column: str, refuse: Callable[[str, str], TraceError]) -> float:
    try:
        value = float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise refuse(column, f"{cell!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise refuse(column, f"{cell!r} is not a finite number from 0 up")
    return value


def _read_mooncake(path: Path, text: str) -> tuple[str, _Rows, tuple[str, ...]]:
    used = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = []
    ignored: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue

        def refuse(name: str, what: str, number: int = number) -> TraceError:
            return TraceError(path, what, line=number, field=name)

        try:
            values = json.loads(line)
        except ValueError as error:
            raise TraceError(path, f"not JSON: {error}", line=number) from None
        if not isinstance(values, dict) or not set(used[:3]) <= values.keys():
            raise TraceError(path, f"not an object with {', '.join(used[:3])}", line=number)
        ignored |= dict.fromkeys(x for x in values if x not in used)
        for name in used[1:3]:
            if type(values[name]) is not int or values[name] < 1:
                raise refuse(name, f"{values[name]!r} is not a whole number from 1 up")
        ids = values.get("hash_ids")
        if ids is not None and (
            not isinstance(ids, list) or any(type(item) is not int for item in ids)
        ):
            raise refuse("hash_ids", "must be a list of whole numbers")
        rows.append(
            TraceRequest(
                _number(values["timestamp"], "timestamp", refuse) / 1000,
                values["input_length"],
                values["output_length"],
                None if ids is None else tuple(ids),
            )
        )
    return "mooncake", tuple(rows), tuple(ignored)


def _in_order(path: Path, rows: _Rows) -> _Rows:
    """Let arrival times count from the first request."""
    first_s = rows[0].arrival_s
    for number, (earlier, later) in enumerate(pairwise(rows), start=2):
        if later.arrival_s < earlier.arrival_s:
            raise TraceError(
                path, f"request {number} is earlier than the one before it; sort by arrival"
            )
    return tuple(replace(row, arrival_s=round(row.arrival_s - first_s, 7)) for row in rows)


def _check_blocks(path: Path, rows: _Rows, block_size: int) -> None:
    for number, row in enumerate(rows, start=1):
        blocks = math.ceil(row.input_tokens / block_size)
        if row.hash_ids is not None and len(row.hash_ids) != blocks:
            raise TraceError(
                path,
                f"request {number} has {len(row.hash_ids)} ids for {row.input_tokens} tokens, "
                f"which are {blocks} blocks of {block_size}; block_size in {_meta_path(path).name} "
                "sets another block size",
                field="hash_ids",
            )


def _meta_path(path: Path) -> Path:
    return path.with_suffix(".meta.json")


def _read_meta(path: Path) -> dict[str, Any]:
    meta_path = _meta_path(path)
    if not meta_path.is_file():
        return {}
    try:
        values = json.loads(meta_path.read_text(encoding="utf-8"))
        found = {
            key: values[key]
            for key in ("name", "block_size", "tick_s", "source", "licence", "attribution")
            if values.get(key) is not None
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(meta_path, f"not a JSON object: {error}") from None
    for key in ("block_size", "tick_s"):
        if key in found and not (isinstance(found[key], int | float) and found[key] > 0):
            raise TraceError(meta_path, f"cannot be {found[key]!r}", field=key)
    return found


def due_times_s(
    arrivals_s: Sequence[float],
    *,
    speedup: float = 1.0,
    tick_s: float | None = None,
    jitter: TickJitter = "uniform",
    seed: int = 0,
) -> list[float]:
    """Return the seconds from the start of the run at which each request is due.

    A log that rounded its times to ticks would send a volley at each tick, and the tail of TTFT
    would measure the rounding. So the requests of one tick are spread over it: at random
    (`uniform`), evenly, or not at all. Their order does not change.
    """
    start_s = arrivals_s[0]
    if tick_s is None or jitter == "none":
        return [(at_s - start_s) / speedup for at_s in arrivals_s]
    places = random.Random(f"tick jitter {seed}")
    due: list[float] = []
    first = 0
    while first < len(arrivals_s):
        at_s, after = arrivals_s[first], first
        while after < len(arrivals_s) and arrivals_s[after] == at_s:
            after += 1
        count = after - first
        width_s = tick_s if after == len(arrivals_s) else min(tick_s, arrivals_s[after] - at_s)
        if jitter == "even":
            shares = [index / count for index in range(count)]
        else:
            shares = sorted(places.random() for _ in range(count))
        due.extend((at_s - start_s + share * width_s) / speedup for share in shares)
        first = after
    return due


def speedup_for(due_s: Sequence[float], rate_per_s: float) -> float:
    """Return the factor that brings `due_s` to a mean rate. Raises BenchError for one moment."""
    duration_s = due_s[-1] - due_s[0]
    if duration_s <= 0:
        raise BenchError("a rate needs two requests at different times; ask for more requests")
    return rate_per_s * duration_s / (len(due_s) - 1)


def _mixed(traces: Sequence[Trace]) -> Trace:
    """Merge traces by time, each at one request a second on average, until one of them ends."""
    sizes = {trace.meta.block_size for trace in traces} - {None}
    if len(sizes) > 1:
        raise BenchError(f"traces with prefix blocks of {sorted(map(str, sizes))} cannot be mixed")
    merged: list[TraceRequest] = []
    ends, first_id = [], 0
    for trace in traces:
        due = due_times_s([row.arrival_s for row in trace.requests], tick_s=trace.meta.tick_s)
        speedup = speedup_for(due, 1.0)
        for at_s, row in zip(due, trace.requests, strict=True):
            ids = None if row.hash_ids is None else tuple(first_id + x for x in row.hash_ids)
            merged.append(replace(row, arrival_s=round(at_s / speedup, 7), hash_ids=ids))
        ends.append(merged[-1].arrival_s)
        first_id += 1 + max((x for row in trace.requests for x in row.hash_ids or ()), default=-1)
    merged.sort(key=lambda row: row.arrival_s)
    meta = TraceMeta(
        name="+".join(trace.meta.name for trace in traces),
        format="+".join(dict.fromkeys(trace.meta.format for trace in traces)),
        block_size=next(iter(sizes), None),
        attribution="; ".join(dict.fromkeys(x.meta.attribution for x in traces if x)),
    )
    return Trace(meta, tuple(row for row in merged if row.arrival_s <= min(ends)))
