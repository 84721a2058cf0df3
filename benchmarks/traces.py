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
import random
from dataclasses import dataclass, field, replace
from datetime import datetime  # noqa: TC003 - msgspec reads the annotations
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TRACES_DIR: Final = Path(__file__).parent / "traces"
NAMED_TRACES: Final[Mapping[str, str]] = {
    "chat": "azure-llm-2023/AzureLLMInferenceTrace_conv.first10000.csv",
    "code": "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
    "longchat": "mooncake-fast25/conversation_trace.first4000.jsonl",
}
BLOCK_SIZE: Final = 512  # of Mooncake's files
_Seconds = Annotated[float, Meta(ge=0)]
_Length = Annotated[int, Meta(ge=1)]


class _Azure(
    Struct, rename={"at": "TIMESTAMP", "given": "ContextTokens", "made": "GeneratedTokens"}
):
    at: datetime
    given: _Length
    made: _Length


class _Burst(
    Struct, rename={"at": "Timestamp", "given": "Request tokens", "made": "Response tokens"}
):
    at: _Seconds
    given: int
    made: int  # 0 for a request that failed there


class _Mooncake(
    Struct, rename={"at": "timestamp", "given": "input_length", "made": "output_length"}
):
    at: _Seconds
    given: _Length
    made: _Length
    hash_ids: tuple[int, ...] | None = None


_CSV_FORMATS: Final[Mapping[str, type[_Azure | _Burst]]] = {"azure": _Azure, "burstgpt": _Burst}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrival_s` counts from the first; `hash_ids` is None if the trace has none."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


class TraceMeta(Struct, frozen=True, kw_only=True):
    """What is known of a trace besides its rows."""

    name: str = ""
    format: str = ""
    block_size: Annotated[int, Meta(gt=0)] | None = None
    tick_s: Annotated[float, Meta(gt=0)] | None = None
    source: str = ""
    licence: str = ""
    attribution: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `ignored` names fields that were in the file but not used."""

    meta: TraceMeta
    requests: tuple[TraceRequest, ...]
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def facts(self) -> dict[str, Any]:
        """Return what a result keeps of the trace."""
        found: dict[str, Any] = msgspec.to_builtins(self.meta)
        return found | {"digest": self.digest(), "ignored_fields": list(self.ignored)}

    def digest(self) -> str:
        """Return a SHA-256 of lengths and prefix ids; it keys the prompts."""
        whole = hashlib.sha256()
        for row in self.requests:
            ids = "-" if row.hash_ids is None else ",".join(map(str, row.hash_ids))
            whole.update(f"{row.input_tokens} {row.output_tokens} {ids}\n".encode())
        return whole.hexdigest()


def load_trace(name_or_path: str) -> Trace:
    """Read a shipped trace by name, or a file by path.

    Raises BenchError for an unknown name or a malformed file, with its line and field.
    """
    if name_or_path in NAMED_TRACES:
        path = TRACES_DIR / NAMED_TRACES[name_or_path]
    else:
        path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(NAMED_TRACES)
        raise BenchError(f"no trace {name_or_path!r}: give one of {names}, or the path of a file")
    read = _read_csv if path.suffix == ".csv" else _read_mooncake
    try:
        name, rows, ignored = read(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise BenchError(f"{path}: no requests in it")
    rows = _in_order(path, rows)
    meta = _read_meta(path.with_suffix(".meta.json"))
    block_size = None
    if any(row.hash_ids is not None for row in rows):
        block_size = meta.block_size or BLOCK_SIZE
        _check_blocks(path, rows, block_size)
    meta = msgspec.structs.replace(
        meta,
        name=meta.name or path.stem,
        format=name,
        block_size=block_size,
        tick_s=meta.tick_s or infer_tick_s(rows),
    )
    return Trace(meta, tuple(rows), tuple(ignored))


def infer_tick_s(rows: Sequence[TraceRequest]) -> float | None:
    """Return the step that arrival times were rounded to, or None if they were not rounded.

    A log is rounded if most of its requests share their arrival time with another one.
    """
    distinct = sorted({row.arrival_s for row in rows})
    if len(distinct) < 2 or 2 * len(distinct) > len(rows):
        return None
    gaps = sorted(later - earlier for earlier, later in pairwise(distinct))
    return gaps[len(gaps) // 2]


_Read = tuple[str, list[TraceRequest], list[str]]


def _read_csv(path: Path, text: str) -> _Read:
    """Return format, rows and ignored columns. Arrivals are seconds of the log's clock."""
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or ()
    columns = {name: kind.__struct_encode_fields__ for name, kind in _CSV_FORMATS.items()}
    name = next((x for x, needed in columns.items() if set(needed) <= set(header)), None)
    if name is None:
        known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in columns.items())
        raise BenchError(f"{path}:1: its columns are of no known format ({known})")
    rows = []
    epoch: datetime | None = None
    for number, values in enumerate(reader, start=2):
        try:
            row = msgspec.convert(values, _CSV_FORMATS[name], strict=False)
        except msgspec.ValidationError as error:
            raise BenchError(f"{path}:{number}: {error}") from None
        if isinstance(row, _Azure):
            epoch = epoch or row.at
            at_s = (row.at - epoch).total_seconds()
        elif row.given and row.made:
            at_s = row.at
        else:
            continue
        rows.append(TraceRequest(at_s, row.given, row.made))
    return name, rows, [x for x in header if x not in columns[name]]


def _read_mooncake(path: Path, text: str) -> _Read:
    decoder = msgspec.json.Decoder(_Mooncake)
    rows, fields = [], dict[str, None]()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise BenchError(f"{path}:{number}: {error}") from None
            fields |= dict.fromkeys(msgspec.json.decode(line))
            rows.append(TraceRequest(row.at / 1000, row.given, row.made, row.hash_ids))
    return "mooncake", rows, [x for x in fields if x not in _Mooncake.__struct_encode_fields__]


def _in_order(path: Path, rows: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Let arrival times count from the first request."""
    for number, (earlier, later) in enumerate(pairwise(rows), start=2):
        if later.arrival_s < earlier.arrival_s:
            raise BenchError(f"{path}: request {number} is earlier than the one before it")
    first_s = rows[0].arrival_s
    return [replace(row, arrival_s=round(row.arrival_s - first_s, 7)) for row in rows]


def _check_blocks(path: Path, rows: Sequence[TraceRequest], block_size: int) -> None:
    for number, row in enumerate(rows, start=1):
        blocks = ceil(row.input_tokens / block_size)
        if row.hash_ids is not None and len(row.hash_ids) != blocks:
            raise BenchError(
                f"{path}: request {number} has {len(row.hash_ids)} hash_ids for "
                f"{row.input_tokens} tokens, which are {blocks} blocks of {block_size}; block_size "
                f"in {path.stem}.meta.json sets another block size"
            )


def _read_meta(path: Path) -> TraceMeta:
    if not path.is_file():
        return TraceMeta()
    try:
        return msgspec.json.decode(path.read_bytes(), type=TraceMeta)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path}: {error}") from None


def due_times_s(
    arrivals_s: Sequence[float], *, tick_s: float | None = None, seed: int = 0
) -> list[float]:
    """Return the seconds from the start of the run at which each request is due.

    A log that rounded its times to ticks would send a volley at each tick, and the tail of TTFT
    would measure the rounding. So the requests of one tick are spread over it at random. Their
    order does not change.
    """
    start_s = arrivals_s[0]
    if tick_s is None:
        return [at_s - start_s for at_s in arrivals_s]
    places = random.Random(f"tick jitter {seed}")

    def spread() -> Iterator[float]:
        groups = [(at_s, len(list(group))) for at_s, group in groupby(arrivals_s)]
        ends = [*(at_s for at_s, _ in groups[1:]), groups[-1][0] + tick_s]
        for (at_s, count), end_s in zip(groups, ends, strict=True):
            width_s = min(tick_s, end_s - at_s)
            for share in sorted(places.random() for _ in range(count)):
                yield at_s - start_s + share * width_s

    return list(spread())


def speedup_for(due_s: Sequence[float], rate_per_s: float) -> float:
    """Return the factor that brings `due_s` to a mean rate. Raises BenchError for one moment."""
    duration_s = due_s[-1] - due_s[0]
    if duration_s <= 0:
        raise BenchError("a rate needs two requests at different times; ask for more requests")
    return rate_per_s * duration_s / (len(due_s) - 1)
