"""Traces: when requests arrived and how long they were; which are sent, and with what prompts.

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
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct, json

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TRACES_DIR: Final = Path(__file__).parent / "traces"
NAMED_TRACES: Final[Mapping[str, str]] = {
    "chat": "azure-llm-2023/AzureLLMInferenceTrace_conv.first10000.csv",
    "code": "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
    "longchat": "mooncake-fast25/conversation_trace.first4000.jsonl",
}
BLOCK_SIZE: Final = 512  # of Mooncake's files


def _format(at: str, at_type: Any, given: str, made: str, least: int = 1) -> type[Struct]:
    """Return what a row holds, by the names of its fields: arrival and lengths."""
    length = Annotated[int, Meta(ge=least)]
    names = {"at": at, "given": given, "made": made}
    ids = ("hash_ids", tuple[int, ...] | None, None)
    fields: list[Any] = [("at", at_type), ("given", length), ("made", length), ids]
    return msgspec.defstruct("Row", fields, rename=names)


_Seconds = Annotated[float, Meta(ge=0)]
_FORMATS: Final[Mapping[str, type[Struct]]] = {
    "azure": _format("TIMESTAMP", datetime, "ContextTokens", "GeneratedTokens"),
    # A request that failed there has a length of 0.
    "burstgpt": _format("Timestamp", _Seconds, "Request tokens", "Response tokens", least=0),
    "mooncake": _format("timestamp", _Seconds, "input_length", "output_length"),
}


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
    beside = path.with_suffix(".meta.json")
    try:
        text = path.read_text(encoding="utf-8")
        known = beside.read_bytes() if beside.is_file() else b"{}"
        meta = json.decode(known, type=TraceMeta)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path}, or {beside.name}: {error}") from None
    name, rows, ignored = _read(path, text.splitlines())
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
    distinct = np.unique([row.arrival_s for row in rows])
    if len(distinct) < 2 or 2 * len(distinct) > len(rows):
        return None
    return float(np.sort(np.diff(distinct))[(len(distinct) - 1) // 2])


def _read(path: Path, lines: Sequence[str]) -> tuple[str, list[TraceRequest], list[str]]:
    """Return the format, the rows with times from the first arrival on, and ignored fields."""
    values: Iterable[tuple[int, Any]]
    if path.suffix == ".csv":
        reader = csv.DictReader(lines)
        needed = {x: _FORMATS[x].__struct_encode_fields__[:3] for x in ("azure", "burstgpt")}
        has = [x for x, columns in needed.items() if set(columns) <= {*(reader.fieldnames or ())}]
        if not has:
            known = "; ".join(f"{x}: {', '.join(columns)}" for x, columns in needed.items())
            raise BenchError(f"{path}:1: its columns are of no known format ({known})")
        name, values = has[0], enumerate(reader, start=2)
    else:
        name = "mooncake"
        values = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    kind = _FORMATS[name]
    found: list[Any] = []
    fields = dict[str, None]()
    for number, value in values:
        try:
            row = json.decode(value, type=dict) if isinstance(value, str) else value
            found.append(msgspec.convert(row, kind, strict=False))
        except msgspec.MsgspecError as error:
            raise BenchError(f"{path}:{number}: {error}") from None
        fields |= dict.fromkeys(row)
    found = [row for row in found if row.given and row.made]
    if not found:
        raise BenchError(f"{path}: no requests in it")
    for number, (earlier, later) in enumerate(pairwise(found), start=2):
        if later.at < earlier.at:
            raise BenchError(f"{path}: request {number} is earlier than the one before it")
    unit_s = 0.001 if name == "mooncake" else 1.0
    rows = []
    for row in found:
        since = row.at - found[0].at
        since_s = since.total_seconds() if isinstance(since, timedelta) else since * unit_s
        rows.append(TraceRequest(round(since_s, 7), row.given, row.made, row.hash_ids))
    return name, rows, [x for x in fields if x not in kind.__struct_encode_fields__]


def _check_blocks(path: Path, rows: Sequence[TraceRequest], block_size: int) -> None:
    for number, row in enumerate(rows, start=1):
        blocks = ceil(row.input_tokens / block_size)
        if row.hash_ids is not None and len(row.hash_ids) != blocks:
            raise BenchError(
                f"{path}: request {number} has {len(row.hash_ids)} hash_ids for "
                f"{row.input_tokens} tokens, which are {blocks} blocks of {block_size}; block_size "
                f"in {path.stem}.meta.json sets another block size"
            )


def due_times_s(
    arrivals_s: Sequence[float], *, tick_s: float | None = None, seed: int = 0
) -> list[float]:
    """Return the seconds from the start of the run at which each request is due.

    A log that rounded its times to ticks would send a volley at each tick, and the tail of TTFT
    would measure the rounding. So the requests of one tick are spread over it at random. Their
    order does not change.
    """
    at_s = np.asarray(arrivals_s) - arrivals_s[0]
    if tick_s is not None:
        ticks, tick_of = np.unique(at_s, return_inverse=True)
        widths_s = np.minimum(tick_s, np.diff(ticks, append=ticks[-1] + tick_s))
        shares = np.random.default_rng(seed).random(len(at_s))
        at_s = np.sort(at_s + shares * widths_s[tick_of])
    due_s: list[float] = at_s.tolist()
    return due_s


def speedup_for(due_s: Sequence[float], rate_per_s: float) -> float:
    """Return the factor that brings `due_s` to a mean rate. Raises BenchError for one moment."""
    duration_s = due_s[-1] - due_s[0]
    if duration_s <= 0:
        raise BenchError("a rate needs two requests at different times; ask for more requests")
    return rate_per_s * duration_s / (len(due_s) - 1)


# -- the requests of a trace that are sent, and their prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is cut to fit a model and a machine; applied in the order of the fields.

    `scale_lengths` multiplies lengths and the prefix block; longer outputs are cut to
    `max_output_tokens`; rows over `max_total_tokens` are dropped; `skip` rows are passed over
    (wrapping to the start of the trace); the next `limit` are sent.
    """

    scale_lengths: Fraction = Fraction(1)
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    skip: int = 0
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What shaping did to a trace. Means are in tokens; `*_before` are of the whole trace."""

    rows: int
    requests: int
    capped: int
    dropped: int
    mean_input_before: float
    mean_output_before: float
    mean_input: float
    mean_output: float
    block_size: int | None

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, mean {self.mean_input:.1f} input and "
            f"{self.mean_output:.1f} output tokens (whole trace: {self.rows} requests, "
            f"{self.mean_input_before:.1f} and {self.mean_output_before:.1f}); outputs shortened: "
            f"{self.capped}, too long and dropped: {self.dropped}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send, each with its row number in the trace (from 0)."""

    rows: tuple[tuple[int, TraceRequest], ...]
    cut: Cut


def shape_workload(trace: Trace, shape: Shape) -> Workload:
    """Apply `shape` to a trace. Raises BenchError if nothing is left."""
    before, factor = trace.meta.block_size, shape.scale_lengths
    block_size = None if before is None else round(before * factor)
    if block_size == 0:
        raise BenchError(
            f"--scale-lengths {factor} leaves less than one token of a prefix block of {before}; "
            f"use at least 1/{before}"
        )
    cap, total = shape.max_output_tokens, shape.max_total_tokens
    kept, capped = [], 0
    for number, row in enumerate(trace.requests):
        scaled = _scale(row, factor, block_size)
        if cap is not None and scaled.output_tokens > cap:
            scaled, capped = replace(scaled, output_tokens=cap), capped + 1
        if total is None or scaled.input_tokens + scaled.output_tokens <= total:
            kept.append((number, scaled))
    if not kept:
        raise BenchError(
            f"no request of {trace.meta.name} fits {total} tokens; raise --max-total-tokens or "
            "lower --scale-lengths"
        )
    first = shape.skip % max(1, len(kept) - (shape.limit or len(kept)) + 1)
    sent = kept[first : None if shape.limit is None else first + shape.limit]
    cut = Cut(
        rows=len(trace.requests),
        requests=len(sent),
        capped=capped,
        dropped=len(trace.requests) - len(kept),
        mean_input_before=fmean(row.input_tokens for row in trace.requests),
        mean_output_before=fmean(row.output_tokens for row in trace.requests),
        mean_input=fmean(row.input_tokens for _, row in sent),
        mean_output=fmean(row.output_tokens for _, row in sent),
        block_size=block_size,
    )
    return Workload(tuple(sent), cut)


def _scale(row: TraceRequest, factor: Fraction, block_size: int | None) -> TraceRequest:
    """Scale one row. A row with block ids keeps exactly as many blocks as it has ids."""
    input_tokens = max(1, round(row.input_tokens * factor))
    if row.hash_ids is not None and block_size is not None:
        blocks = len(row.hash_ids)
        input_tokens = min(max(input_tokens, (blocks - 1) * block_size + 1), blocks * block_size)
    output_tokens = max(1, round(row.output_tokens * factor))
    return replace(row, input_tokens=input_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of token ids that share prefixes as far as the trace says.

    The tokens of a block are a function of the trace's digest, the seed and the block's id
    (SHAKE-256), so all processes make the same.
    """

    digest: str
    seed: int
    vocab_size: int
    block_size: int | None

    def tokens(self, name: str, row: TraceRequest) -> list[int]:
        """Return the prompt of a row. `name` tells rows without block ids apart."""
        if row.hash_ids is None or self.block_size is None:
            return self._draw(f"row/{name}", row.input_tokens)
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            left = min(self.block_size, row.input_tokens - len(prompt))
            prompt += self._draw(f"block/{hash_id}", left)
        return prompt

    def _draw(self, key: str, count: int) -> list[int]:
        # Tokenizers keep special tokens at both ends of the vocabulary.
        margin = min(1000, self.vocab_size // 8)
        span = max(1, self.vocab_size - 2 * margin)
        raw = hashlib.shake_256(f"{self.digest}/{self.seed}/{key}".encode()).digest(4 * count)
        words = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
        tokens: list[int] = (((words * np.uint64(span)) >> np.uint64(32)) + margin).tolist()
        return tokens
