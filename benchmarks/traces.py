"""Traces with arrival times and lengths of requests.

Formats, recognised by suffix and header:

azure     CSV of https://github.com/Azure/AzurePublicDataset
burstgpt  CSV of https://github.com/HPMLL/BurstGPT
mooncake  JSON lines of https://github.com/kvcache-ai/Mooncake; `timestamp` in milliseconds, and
          optionally `hash_ids`, one for each block of input tokens: two requests share the blocks
          of their longest common prefix of ids. Requests with one `session_id` are the turns of
          a session: each starts `delay` milliseconds after the previous one ends. Other fields are
          ignored.

The trace `agent` is drawn at random from published statistics (`agent_trace`).

`NAME.meta.json` next to a trace may have `name`, `block_size` (tokens per hash id, default 512),
`tick_s` (the resolution of the log's times), `source`, `licence` and `attribution`.
"""

from __future__ import annotations

import csv
import hashlib
import math
import random
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise, takewhile
from math import ceil
from operator import eq
from pathlib import Path
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
AGENT: Final = "agent"
BLOCK_SIZE: Final = 512  # of Mooncake's files


_Seconds = Annotated[float, Meta(ge=0)]


def _format(at: str, at_type: Any, given: str, made: str, least: int = 1) -> type[Struct]:
    """Return the type of a row, given the names of its fields for arrival and lengths."""
    length = Annotated[int, Meta(ge=least)]
    names = {"at": at, "given": given, "made": made}
    ids = ("hash_ids", tuple[int, ...] | None, None)
    session = (("session_id", str, ""), ("delay", _Seconds, 0.0))
    fields: list[Any] = [("at", at_type), ("given", length), ("made", length), ids, *session]
    return msgspec.defstruct("Row", fields, rename=names)


_FORMATS: Final[Mapping[str, type[Struct]]] = {
    "azure": _format("TIMESTAMP", datetime, "ContextTokens", "GeneratedTokens"),
    # Failed requests in this log have a length of 0.
    "burstgpt": _format("Timestamp", _Seconds, "Request tokens", "Response tokens", least=0),
    "mooncake": _format("timestamp", _Seconds, "input_length", "output_length"),
}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `arrival_s` is relative to the first request. `hash_ids` is None if the trace
    has none.

    `session`: name of its session, or "". A turn is sent `pause_s` after the previous turn ends;
    `arrival_s` is then only the time in the log. `kept_tokens`: number of tokens at the start of
    its prompt that the previous turn had in prompt or answer.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    session: str = ""
    pause_s: float = 0.0
    kept_tokens: int = 0


class TraceMeta(Struct, frozen=True, kw_only=True):
    """Metadata of a trace."""

    name: str = ""
    format: str = ""
    block_size: Annotated[int, Meta(gt=0)] | None = None
    tick_s: Annotated[float, Meta(gt=0)] | None = None
    source: str = ""
    licence: str = ""
    attribution: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `ignored`: names of unused fields in the file."""

    meta: TraceMeta
    requests: tuple[TraceRequest, ...]
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the trace that a result stores."""
        found: dict[str, Any] = msgspec.to_builtins(self.meta)
        return found | {"digest": self.digest(), "ignored_fields": list(self.ignored)}

    def digest(self) -> str:
        """Return the SHA-256 of lengths and prefix ids. It seeds the prompts."""
        whole = hashlib.sha256()
        for row in self.requests:
            ids = "-" if row.hash_ids is None else ",".join(map(str, row.hash_ids))
            turn = f" {row.session} {row.kept_tokens}" if row.session else ""
            whole.update(f"{row.input_tokens} {row.output_tokens} {ids}{turn}\n".encode())
        return whole.hexdigest()


def load_trace(name_or_path: str) -> Trace:
    """Read a shipped trace by name, or a file by path.

    Raises BenchError for an unknown name or a malformed file, with its line and field.
    """
    if name_or_path == AGENT:
        return agent_trace()
    if name_or_path in NAMED_TRACES:
        path = TRACES_DIR / NAMED_TRACES[name_or_path]
    else:
        path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join((*NAMED_TRACES, AGENT))
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
    rows = _with_kept_tokens(rows, block_size)
    meta = msgspec.structs.replace(
        meta,
        name=meta.name or path.stem,
        format=name,
        block_size=block_size,
        tick_s=meta.tick_s or infer_tick_s(rows),
    )
    return Trace(meta, tuple(rows), tuple(ignored))


def infer_tick_s(rows: Sequence[TraceRequest]) -> float | None:
    """Return the resolution of the arrival times, or None if they were not rounded.

    A log is rounded if most of its requests share their arrival time with another one.
    """
    distinct = np.unique([row.arrival_s for row in rows])
    if len(distinct) < 2 or 2 * len(distinct) > len(rows):
        return None
    return float(np.sort(np.diff(distinct))[(len(distinct) - 1) // 2])


def _read(path: Path, lines: Sequence[str]) -> tuple[str, list[TraceRequest], list[str]]:
    """Return the format, the rows with times relative to the first arrival, and ignored fields."""
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
        session = (row.session_id, row.delay * unit_s)
        rows.append(TraceRequest(round(since_s, 7), row.given, row.made, row.hash_ids, *session))
    return name, rows, [x for x in fields if x not in kind.__struct_encode_fields__]


def _with_kept_tokens(rows: Sequence[TraceRequest], block_size: int | None) -> list[TraceRequest]:
    """Return rows with `kept_tokens` set, from block ids if there are any. Otherwise a turn keeps
    the whole previous prompt and answer, up to its own length.
    """
    last: dict[str, TraceRequest] = {}
    found = []
    for row in rows:
        before = last.get(row.session)
        if row.session and before is not None:
            if row.hash_ids is not None and block_size is not None:
                same = map(eq, row.hash_ids, before.hash_ids or ())
                kept = block_size * sum(takewhile(bool, same))
            else:
                kept = before.input_tokens + before.output_tokens
            row = replace(row, kept_tokens=min(kept, row.input_tokens - 1))  # noqa: PLW2901
        last[row.session] = row
        found.append(row)
    return found


def _check_blocks(path: Path, rows: Sequence[TraceRequest], block_size: int) -> None:
    for number, row in enumerate(rows, start=1):
        blocks = ceil(row.input_tokens / block_size)
        if row.hash_ids is not None and len(row.hash_ids) != blocks:
            raise BenchError(
                f"{path}: request {number} has {len(row.hash_ids)} hash_ids for "
                f"{row.input_tokens} tokens, which are {blocks} blocks of {block_size}; block_size "
                f"in {path.stem}.meta.json sets another block size"
            )


# -- sessions of agents, drawn at random

_AGENT_META: Final = TraceMeta(
    name=AGENT,
    format="drawn",
    source="https://github.com/callanjfox/kv-cache-tester (statistics only)",
    attribution="statistics of the WEKA Claude Code sessions; no data of theirs",
)
# Median and sigma of log-normal distributions, in tokens; `turns` is a number, `pause` in seconds.
_TURNS: Final = (45.0, 1.0)
_FIRST_PROMPT: Final = (20_000.0, 0.45)
_ANSWER: Final = (216.0, 1.15)
_TOOL_RESULT: Final = (1_500.0, 1.5)
_CONTEXT: Final = (260_000.0, 0.5)
_PAUSE_S: Final = (10.0, 1.2)
_MOST_TURNS: Final = 400
_MOST_NEW_TOKENS: Final = 30_000
_SUMMARY_TOKENS: Final = 5_000
_ANSWER_S: Final = 6.1
_BETWEEN_SESSIONS_S: Final = 20.0


def agent_trace(sessions: int = 200, seed: int = 0) -> Trace:
    """Return sessions of coding agents, drawn at random.

    A turn's prompt is the previous prompt and answer, and the result of a tool. If this exceeds the
    context, the agent compacts it: the first prompt stays, and a summary replaces the rest. Nothing
    is shared between sessions.

    The distributions are fitted to figures of the 710 sessions (48,658 requests) of the WEKA corpus
    of Claude Code traffic in callanjfox/kv-cache-tester at commit 94f6046: 69 turns a session,
    prompts of 123,000 tokens on average (median 105,000, p90 236,000, p99 500,000), answers of 439
    (216, 899, 3,663), a median answer time of 6.1 s, a median pause of 10 s, 96 % of a prompt in
    common with the request before it. NVIDIA reports 85 to 97 % cache hits for agent traffic with
    Dynamo. Spread and compaction are assumptions, chosen so that the trace has these figures.
    """
    chance = random.Random(f"agents {seed}")

    def draw(median: float, sigma: float, most: float = math.inf) -> int:
        return max(1, round(min(most, chance.lognormvariate(math.log(median), sigma))))

    rows: list[TraceRequest] = []
    start_s = 0.0
    for number in range(sessions):
        at_s, pause_s, kept = start_s, 0.0, 0
        first, context = draw(*_FIRST_PROMPT), draw(*_CONTEXT)
        prompt = first
        for _ in range(draw(*_TURNS, _MOST_TURNS)):
            answer = draw(*_ANSWER, _MOST_NEW_TOKENS)
            rows.append(TraceRequest(at_s, prompt, answer, None, f"agent-{number}", pause_s, kept))
            kept = prompt + answer
            prompt = kept + draw(*_TOOL_RESULT, _MOST_NEW_TOKENS)
            if prompt > context:
                kept, prompt = first, first + _SUMMARY_TOKENS
            pause_s = chance.lognormvariate(math.log(_PAUSE_S[0]), _PAUSE_S[1])
            at_s += _ANSWER_S + pause_s
        start_s += chance.expovariate(1 / _BETWEEN_SESSIONS_S)
    rows.sort(key=lambda row: row.arrival_s)
    return Trace(_AGENT_META, tuple(rows))
