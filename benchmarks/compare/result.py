"""The stored result of a comparison: facts about each variant, and the timeline of every
request."""

from __future__ import annotations

import json
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from benchmarks.errors import BenchError
from benchmarks.metrics import RequestTimeline  # noqa: TC001 - msgspec reads the annotations
from benchmarks.replay import jsonable, parse

SCHEMA: Final = "pdserve.bench.compare/2"
Kind = Literal["round", "probe"]


@dataclass(frozen=True, slots=True)
class VariantSettings:
    """Settings of a variant, from its workers' registrations: their number by role, sums over them,
    and the distinct values of every other setting. `price_per_hour` is None if a worker has no
    price."""

    workers: Mapping[str, int]
    cores: int
    kv_cache_tokens: int
    of_workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpus: int = 0
    price_per_hour: float | None = None

    @property
    def device(self) -> tuple[str, int]:
        """The kind of device, "gpu" or "core", and its number."""
        return ("gpu", self.gpus) if self.gpus else ("core", self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFacts:
    """Facts about a variant. `settings` is None for an endpoint, whose settings are unknown."""

    name: str
    kind: Literal["started", "endpoint"]
    api: Literal["grpc", "http"]
    model: str
    settings: VariantSettings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """CPU seconds in `window_s`: of the measured variant's router and workers (None for an
    endpoint), of this client, of the waiting variants, and of all other processes."""

    window_s: float
    router_s: float | None
    workers_s: float | None
    client_s: float
    idle_s: float
    others_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One replay against one variant. `notes`: reasons why it is invalid. `repeated`: it replaces a
    replay in which the client was late."""

    variant: str
    kind: Kind
    number: int
    rate_per_s: float
    speedup: float
    workload: Mapping[str, Any]
    processor: ProcessorUse
    notes: tuple[str, ...] = ()
    repeated: bool = False
    records: tuple[RequestTimeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult:
    """A comparison. Ratios are to `baseline`. `differ`: the compared settings, in which variants
    may differ. `is_complete` is False while rounds or probes are missing."""

    created: str
    trace: Mapping[str, Any]
    settings: Mapping[str, Any]
    host: Mapping[str, Any]
    slo_s: Mapping[str, float]
    baseline: str
    differ: tuple[str, ...] = ()
    is_complete: bool = True
    variants: tuple[VariantFacts, ...]
    measurements: tuple[Measurement, ...]

    def of(self, variant: str, kind: Kind) -> list[Measurement]:
        """Return the rounds or the probes of a variant, in order."""
        return [x for x in self.measurements if (x.variant, x.kind) == (variant, kind)]

    def shown(self, variant: str) -> list[Measurement]:
        """Return the rounds of a variant, or its probes if it has no rounds."""
        return self.of(variant, "round") or self.of(variant, "probe")


def to_json(result: CompareResult, summary: object) -> str:
    """Return a result and its summary as one line of JSON."""
    found = {"schema": SCHEMA, **jsonable(result), "summary": summary}
    return json.dumps(found, separators=(",", ":")) + "\n"


def from_json(whole: Any) -> CompareResult:
    """Return the result that `to_json` wrote. Raises BenchError for other content."""
    if not isinstance(whole, dict) or whole.get("schema") != SCHEMA:
        raise BenchError(f"not a result of `pdserve bench compare` ({SCHEMA})")
    return parse(whole, CompareResult)
