"""Traces: what arrived, when, and how long it was; the files that hold them.

The canonical file is JSON lines, a superset of Mooncake's format, so that other replay tools read
it as it is::

    {"timestamp": 0.0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

``timestamp`` is in milliseconds; ``hash_ids`` names each block of ``block_size`` input tokens, the
last of which may be partly filled; two requests share as long a prefix as their ids agree. A file
``NAME.meta.json`` beside ``NAME.jsonl`` or ``NAME.csv`` says what the rows leave out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.errors import BenchError, TraceError
from benchmarks.trace_formats import FORMATS, TraceRequest, read_rows
from benchmarks.trace_mix import mixed_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "NAMED_TRACES",
    "Trace",
    "TraceMeta",
    "TraceRequest",
    "load_trace",
    "write_trace",
]

HashScope = Literal["global", "session"]

TRACES_DIR: Final = Path(__file__).parent / "traces"

NAMED_TRACES: Final[Mapping[str, str]] = {
    "chat": "azure-llm-2023/AzureLLMInferenceTrace_conv.first10000.csv",
    "code": "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
    "longchat": "mooncake-fast25/conversation_trace.first4000.jsonl",
}
"""The shipped traces, under ``benchmarks/traces``."""

MOONCAKE_BLOCK_SIZE: Final = 512
"""Tokens per hash id in Mooncake's files, which do not say it themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """What is known about a trace besides its rows.

    ``block_size`` is None where no row has hash ids. ``tick_s`` is the step that the log rounded
    its arrival times to, or None where they are as fine as they look. ``sha256`` is that of the
    file; ``""`` until it is written.
    """

    name: str
    block_size: int | None = None
    hash_scope: HashScope = "global"
    tick_s: float | None = None
    sha256: str = ""
    source: str = ""
    commit: str = ""
    licence: str = ""
    attribution: str = ""
    changes: str = ""

    def scope_of(self, row: TraceRequest) -> str | None:
        """What a row's hash ids are relative to: its session, or None for the whole trace."""
        return row.session_id if self.hash_scope == "session" else None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    meta: TraceMeta
    requests: tuple[TraceRequest, ...]

    def digest(self) -> str:
        """SHA-256 of the rows' lengths and prefix ids.

        It keys the synthesised prompts, so a converted trace must give the digest of its origin:
        neither the file's format nor the arrival times are part of it.
        """
        whole = hashlib.sha256()
        for row in self.requests:
            ids = "-" if row.hash_ids is None else ",".join(map(str, row.hash_ids))
            session = json.dumps(row.session_id)
            whole.update(f"{row.input_tokens} {row.output_tokens} {ids} {session}\n".encode())
        return whole.hexdigest()


def load_trace(
    name_or_path: str, *, file_format: str | None = None, block_size: int | None = None
) -> Trace:
    """Read a shipped trace by its name, any trace file by its path, or several of them, joined by
    ``+``, as one in which each has the same rate.

    ``file_format`` is one of :data:`FORMATS`, by default told by the suffix; ``block_size``
    overrides the sidecar's. Raises :class:`BenchError` for an unknown name and
    :class:`TraceError` for a file that is not a trace.
    """
    parts = name_or_path.split("+")
    if len(parts) > 1 and not Path(name_or_path).exists():
        return _mixed([load_trace(part) for part in parts])
    path = _find(name_or_path)
    meta = _read_meta(path)
    raw = _read_bytes(path)
    sha256 = hashlib.sha256(raw).hexdigest()
    if meta is not None and meta.sha256 not in ("", sha256):
        raise TraceError(
            path,
            f"its sha256 is {sha256}, but {_meta_path(path).name} says {meta.sha256}; "
            "convert the trace again, or remove that file if the change is meant",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(path, f"not UTF-8 text: {error}") from None
    size = block_size or (meta.block_size if meta is not None else None) or MOONCAKE_BLOCK_SIZE
    rows = read_rows(path, text, file_format=file_format or _guess_format(path), block_size=size)
    has_ids = any(row.hash_ids is not None for row in rows)
    known = {} if meta is None else asdict(meta)
    known.setdefault("name", path.stem)
    known["sha256"] = sha256
    known["block_size"] = size if has_ids else None
    if known.get("tick_s") is None:
        known["tick_s"] = infer_tick_s(rows)
    trace = Trace(meta=TraceMeta(**known), requests=rows)
    _check_sessions(path, trace)
    return trace


def _mixed(traces: Sequence[Trace]) -> Trace:
    metas = [trace.meta for trace in traces]
    said: dict[str, Any] = {}
    for key in ("source", "commit", "licence", "attribution", "changes"):
        values = [str(getattr(meta, key)) for meta in metas]
        said[key] = "; ".join(dict.fromkeys(value for value in values if value))
    size = next((meta.block_size for meta in metas if meta.block_size is not None), None)
    name = "+".join(meta.name for meta in metas)
    return Trace(TraceMeta(name=name, block_size=size, **said), mixed_rows(traces))


def _check_sessions(path: Path, trace: Trace) -> None:
    if trace.meta.hash_scope != "session":
        return
    for number, row in enumerate(trace.requests, start=1):
        if row.hash_ids is not None and row.session_id is None:
            raise TraceError(
                path,
                f"missing in request {number}, whose hash_ids mean something only in a session",
                field="session_id",
            )


def infer_tick_s(rows: Sequence[TraceRequest]) -> float | None:
    """The step arrival times were rounded to, if most requests share theirs with another.

    Found as the median gap between distinct arrival times; None for a log that is not rounded.
    """
    distinct = sorted({row.arrival_s for row in rows})
    if len(distinct) < 2 or 2 * len(distinct) > len(rows):
        return None
    gaps = sorted(later - earlier for earlier, later in pairwise(distinct))
    return gaps[len(gaps) // 2]


def write_trace(trace: Trace, path: Path) -> TraceMeta:
    """Write a canonical file and its sidecar; return what the sidecar says.

    Arrival times are kept to 100 ns. Raises :class:`BenchError` where the files cannot be written.
    """
    if path.suffix != ".jsonl":
        raise BenchError(f"{path}: a canonical trace is JSON lines; name it *.jsonl")
    text = "".join(json.dumps(_canonical(row)) + "\n" for row in trace.requests)
    data = text.encode()
    meta = replace(trace.meta, sha256=hashlib.sha256(data).hexdigest())
    known = {key: value for key, value in asdict(meta).items() if value not in (None, "")}
    try:
        path.write_bytes(data)
        _meta_path(path).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from None
    return meta


def _canonical(row: TraceRequest) -> dict[str, object]:
    out: dict[str, object] = {
        "timestamp": round(row.arrival_s * 1000, 4),
        "input_length": row.input_tokens,
        "output_length": row.output_tokens,
    }
    if row.hash_ids is not None:
        out["hash_ids"] = list(row.hash_ids)
    if row.session_id is not None:
        out["session_id"] = row.session_id
    return out


def _find(name_or_path: str) -> Path:
    if name_or_path in NAMED_TRACES:
        return TRACES_DIR / NAMED_TRACES[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(NAMED_TRACES)
        raise BenchError(f"no trace {name_or_path!r}: give one of {names}, or the path of a file")
    return path


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from None


def _guess_format(path: Path) -> str:
    guess = {".csv": "azure", ".jsonl": "canonical"}.get(path.suffix)
    if guess is None:
        formats = ", ".join(FORMATS)
        raise TraceError(
            path, f"unknown suffix {path.suffix!r}; say which format it has: {formats}"
        )
    return guess


def _meta_path(path: Path) -> Path:
    return path.with_suffix(".meta.json")


def _read_meta(path: Path) -> TraceMeta | None:
    meta_path = _meta_path(path)
    if not meta_path.is_file():
        return None
    try:
        values = json.loads(_read_bytes(meta_path))
    except ValueError as error:
        raise TraceError(meta_path, f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise TraceError(meta_path, "must be a JSON object")
    known = {item.name for item in fields(TraceMeta)}
    for key, value in values.items():
        if key not in known:
            raise TraceError(meta_path, f"unknown; known are {', '.join(sorted(known))}", field=key)
        if not _meta_value_is_valid(key, value):
            raise TraceError(meta_path, f"cannot be {value!r}", field=key)
    merged: dict[str, Any] = {"name": path.stem} | values
    return TraceMeta(**merged)


def _meta_value_is_valid(key: str, value: object) -> bool:
    if key == "block_size":
        return type(value) is int and value > 0
    if key == "tick_s":
        return type(value) in (int, float) and float(str(value)) > 0
    if key == "hash_scope":
        return value in ("global", "session")
    return isinstance(value, str)
