"""A comparison as it is kept: what each arm was, and every request's timeline. All figures follow
from these alone, by :func:`benchmarks.compare.summary.summarise_compare`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.compare.processor import ProcessorUse
from benchmarks.compare.settings import ArmSettings
from benchmarks.errors import BenchError
from benchmarks.records import RequestRecord
from benchmarks.result import jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA: Final = "pdserve.bench.compare/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """What an arm was. ``settings`` is None for an endpoint, of which nothing is known."""

    name: str
    kind: Literal["started", "endpoint"]
    face: Literal["grpc", "http"]
    model: str
    settings: ArmSettings | None
    ready_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One replay against one arm. ``workload`` tells how the trace was cut; ``notes`` say what
    spoils it; ``repeated`` is whether it replaces one in which the client was late."""

    arm: str
    kind: Literal["round", "probe"]
    number: int
    rate_per_s: float
    speedup: float
    workload: Mapping[str, Any]
    processor: ProcessorUse
    notes: tuple[str, ...] = ()
    repeated: bool = False
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """A whole comparison. Ratios are to ``baseline``; ``meant_to_differ`` names the settings in
    which arms may differ, for they are what is compared."""

    created: str
    trace: Mapping[str, Any]
    settings: Mapping[str, Any]
    host: Mapping[str, Any]
    slo_s: Mapping[str, float]
    baseline: str
    meant_to_differ: tuple[str, ...] = ()
    arms: tuple[ArmFacts, ...]
    measurements: tuple[Measurement, ...]

    def of(self, arm: str, kind: Literal["round", "probe"]) -> list[Measurement]:
        """An arm's rounds, or its probes, in order."""
        return [x for x in self.measurements if (x.arm, x.kind) == (arm, kind)]


def to_json(result: CompareResult) -> dict[str, Any]:
    """The result as JSON holds it; :func:`from_json` gives it back."""
    whole = {item.name: getattr(result, item.name) for item in fields(result)}
    whole["measurements"] = [
        {item.name: getattr(x, item.name) for item in fields(x)}
        | {"records": [_pack(record) for record in x.records]}
        for x in result.measurements
    ]
    found = jsonable({"schema": SCHEMA} | whole)
    assert isinstance(found, dict)
    return found


def from_json(whole: object) -> CompareResult:
    """Raises :class:`BenchError` for what :func:`to_json` did not make."""
    if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
        raise BenchError(f"not a result of `pdserve bench compare` ({SCHEMA})")
    try:
        values = {item.name: whole[item.name] for item in fields(CompareResult)}
        values["meant_to_differ"] = tuple(values["meant_to_differ"])
        values["arms"] = tuple(_arm(item) for item in values["arms"])
        values["measurements"] = tuple(_measurement(item) for item in values["measurements"])
        return CompareResult(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"part of the result is missing or wrong: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file; raises :class:`BenchError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from None


def dump(value: object) -> str:
    """One line of JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def _arm(values: Mapping[str, Any]) -> ArmFacts:
    settings = values["settings"]
    if settings is not None:
        of_workers = {name: tuple(found) for name, found in settings["of_workers"].items()}
        settings = ArmSettings(**(settings | {"of_workers": of_workers}))
    return ArmFacts(**(dict(values) | {"settings": settings}))


def _measurement(values: Mapping[str, Any]) -> Measurement:
    return Measurement(
        **(
            dict(values)
            | {
                "processor": ProcessorUse(**values["processor"]),
                "notes": tuple(values["notes"]),
                "records": tuple(_unpack(record) for record in values["records"]),
            }
        )
    )


def _pack(record: RequestRecord) -> dict[str, Any]:
    """A record without what is empty; its chunks as the first arrival and the gaps after it, in
    microseconds, and their tokens as 1 where each has one."""
    values = {name: value for name, value in asdict(record).items() if value is not None}
    arrivals = [round(at_s * 1e6) for at_s in values.pop("chunk_s")]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    if arrivals:
        values["chunk_us"] = [arrivals[0], *gaps]
    if record.chunk_tokens is not None and set(record.chunk_tokens) == {1}:
        values["chunk_tokens"] = 1
    return values


def _unpack(values: Mapping[str, Any]) -> RequestRecord:
    known = dict(values)
    at_us, arrivals = 0, []
    for gap in known.pop("chunk_us", ()):
        at_us += gap
        arrivals.append(at_us / 1e6)
    tokens = known.get("chunk_tokens")
    if tokens == 1:
        known["chunk_tokens"] = (1,) * len(arrivals)
    elif tokens is not None:
        known["chunk_tokens"] = tuple(tokens)
    return RequestRecord(chunk_s=tuple(arrivals), **known)
