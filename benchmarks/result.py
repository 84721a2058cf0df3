"""A run's result as it is kept: every request's timeline, and everything that was set.

The summary in the file is there to be read; it is computed from the records alone, so a reader with
other definitions can compute its own. Infinite values, which only adjusted percentiles have, are
written as null.
"""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from benchmarks.errors import BenchError
from benchmarks.metrics import summarise
from benchmarks.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.metrics import Summary

SCHEMA: Final = "pdserve.bench.replay/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One replay. ``warmup`` has the records left out of every figure; ``host`` is the client's."""

    created: str
    trace: Mapping[str, object]
    workload: Mapping[str, object]
    target: Mapping[str, object]
    settings: Mapping[str, object]
    slo_s: Mapping[str, float] = field(default_factory=dict)
    host: Mapping[str, object]
    records: tuple[RequestRecord, ...]
    warmup: tuple[RequestRecord, ...] = ()

    def summary(self) -> Summary:
        """The figures, from the records alone."""
        return summarise(self.records, self.slo_s)

    def to_json(self, *, with_records: bool = True) -> dict[str, object]:
        """A JSON object with the summary, and the timelines unless they are not wanted."""
        whole = {"schema": SCHEMA} | {
            item.name: jsonable(getattr(self, item.name))
            for item in fields(self)
            if with_records or item.name not in ("records", "warmup")
        }
        return whole | {"summary": jsonable(self.summary())}


def jsonable(value: object) -> object:
    """``value`` as JSON holds it: dataclasses as objects, infinities as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def write_result(result: ReplayResult, path: Path) -> None:
    """Write a result; raises :class:`BenchError` if that cannot be done."""
    text = json.dumps(result.to_json(), separators=(",", ":"), allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write --out {path}: {error.strerror or error}") from None


def read_result(path: Path) -> ReplayResult:
    """Read what :func:`write_result` wrote; raises :class:`BenchError` for anything else."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
    if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
        raise BenchError(f"{path} is not a result of `pdserve bench replay` ({SCHEMA})")
    try:
        values = {item.name: whole[item.name] for item in fields(ReplayResult)}
        values["records"] = tuple(_record(item) for item in values["records"])
        values["warmup"] = tuple(_record(item) for item in values["warmup"])
    except (KeyError, TypeError) as error:
        raise BenchError(f"{path} lacks part of a result: {error}") from None
    return ReplayResult(**values)


def _record(values: Mapping[str, object]) -> RequestRecord:
    known = dict(values)
    for name in ("chunk_s", "chunk_tokens"):
        if isinstance(items := known[name], list):
            known[name] = tuple(items)
    # A wrong set of fields is a TypeError, which the caller reports.
    return RequestRecord(**known)  # type: ignore[arg-type]


def host_facts() -> dict[str, object]:
    """What of this machine bears on the figures; nothing that names it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"
