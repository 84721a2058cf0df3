"""The figures of a comparison, computed from its result.

A figure is the median over rounds. A ratio is the median over rounds of the quotient with the
baseline in the same round. Percentiles of a round count failed requests as infinitely slow. A sweep
searches for the highest rate at which 90 % of requests meet both limits. DistServe (Zhong et al.,
OSDI 2024) uses this rate to compare systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.compare.fairness import Validity, judge
from benchmarks.metrics import TURN_RANGES, Summary, summarise
from benchmarks.replay import jsonable
from benchmarks.stats import Estimate, estimate, ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.compare.result import CompareResult, Measurement, VariantFacts, VariantSettings
    from benchmarks.metrics import SessionSummary

ATTAINMENT: Final = 0.9
_COUNTS: Final = ("requests", "ok", "failed", "timed_out", "errors", "itl_caution")
CLOSE: Final = 1.1  # the search ends when failed rate / passed rate is at most this


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured rate, and the share of its requests that met every limit."""

    rate_per_s: float
    attainment: float

    @property
    def passed(self) -> bool:
        return self.attainment >= ATTAINMENT


def probes_of(measurements: Iterable[Measurement], slo_s: Mapping[str, float]) -> list[Probe]:
    found = []
    for measurement in measurements:
        slo = summarise(measurement.records, slo_s).slo
        assert slo is not None, "the command line refuses a sweep without limits"
        found.append(Probe(measurement.rate_per_s, slo.attainment))
    return found


def bracket(probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """Return (highest passed rate below all failed rates, lowest failed rate)."""
    failed = min((x.rate_per_s for x in probes if not x.passed), default=None)
    below = [x.rate_per_s for x in probes if x.passed and (failed is None or x.rate_per_s < failed)]
    return max(below, default=None), failed


def next_rate(probes: Sequence[Probe], *, first: float, limit: int) -> float | None:
    """Return the rate to try next, or None when the search is over.

    Double or halve the rate until one probe has passed and one has failed. Then bisect their ratio.
    """
    if len(probes) >= limit:
        return None
    passed, failed = bracket(probes)
    if passed is None:
        return first if failed is None else failed / 2
    if failed is None:
        return passed * 2
    return None if failed / passed <= CLOSE else sqrt(passed * failed)


class ComparedMetric(NamedTuple):
    """One line of the comparison. `unit` is `s`, `share`, `per_s`, `tokens` or `price`."""

    label: str
    unit: str


LESS_IS_BETTER: Final = ("s", "tokens", "price")
_LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "tt2t": "TT2T", "e2e": "E2E", "itl": "ITL"}
_SESSIONS: Final = {"session": "session time", "waited": "session time without pauses"}
_RATES: Final = {"goodput": "goodput, requests/s", "output_tokens": "output tokens/s"}
_PER: Final = {"": "", "_per_core": " per core", "_per_gpu": " per GPU"}
FIGURES: Final = {
    **{
        f"{name}_{p}": ComparedMetric(f"{label} {p}", "s")
        for name, label in _LATENCIES.items()
        for p in ("p50", "p99")
    },
    **{f"ttft_turn_{x}": ComparedMetric(f"TTFT of turn {x} p50", "s") for x in TURN_RANGES},
    **{
        f"{name}_{p}": ComparedMetric(f"{label} {p}", "s")
        for name, label in _SESSIONS.items()
        for p in ("p50", "p99")
    },
    "hit_rate": ComparedMetric("cached prompt tokens of sessions", "share"),
    "recomputed": ComparedMetric("tokens of earlier turns computed again, a turn", "tokens"),
    "attainment": ComparedMetric("SLO attainment", "share"),
    "cost": ComparedMetric("cost per million output tokens within the SLO", "price"),
    **{
        f"{name}{per}": ComparedMetric(f"{label}{text}", "per_s")
        for name, label in _RATES.items()
        for per, text in _PER.items()
    },
}


def figures_of(summary: Summary, settings: VariantSettings | None) -> dict[str, float]:
    """Return the figures of one round by key, without undefined ones."""
    found: dict[str, float] = {}
    for name, sample in (*summary.latency.items(), ("itl", summary.itl)):
        if sample is not None and name in _LATENCIES:
            found |= {f"{name}_p50": sample.p50, f"{name}_p99": sample.p99}
    if summary.sessions is not None:
        found |= _session_figures(summary.sessions)
    rates = {"output_tokens": summary.output_tokens_per_s}
    if summary.slo is not None:
        found["attainment"] = summary.slo.attainment
        rates["goodput"] = summary.slo.goodput_per_s
        cost = _cost(settings, summary.slo.tokens_per_s)
        found |= {} if cost is None else {"cost": cost}
    device, count = settings.device if settings else ("core", 0)
    for name, rate in rates.items():
        found[name] = rate
        if count:
            found[f"{name}_per_{device}"] = rate / count
    return found


def _session_figures(sessions: SessionSummary) -> dict[str, float]:
    found = {f"ttft_turn_{turns}": sample.p50 for turns, sample in sessions.ttft.items()}
    for name, sample in (("session", sessions.time), ("waited", sessions.waited)):
        if sample is not None:
            found |= {f"{name}_p50": sample.p50, f"{name}_p99": sample.p99}
    if sessions.hit_rate is not None and sessions.recomputed_tokens is not None:
        found["hit_rate"] = sessions.hit_rate
        found["recomputed"] = sessions.recomputed_tokens / sessions.turns
    return found


def _cost(settings: VariantSettings | None, tokens_per_s: float) -> float | None:
    """Return the price of a million tokens, or None if it is unknown."""
    if settings is None or settings.price_per_hour is None or not tokens_per_s:
        return None
    return settings.price_per_hour / 3600.0 / tokens_per_s * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """The probes of a variant. `passed`: highest passed rate below all failed ones. `cost`: price
    of a million output tokens within the SLO at this rate."""

    probes: tuple[Probe, ...]
    passed: float | None
    failed: float | None
    per_device: float | None
    device: str
    ratio: float | None
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """One variant over all rounds. `figures` and `ratios` are by the key of the figure; undefined
    ones are missing."""

    name: str
    requests: int
    ok: int
    failed: int
    timed_out: int
    errors: Mapping[str, int]
    figures: Mapping[str, Estimate]
    ratios: Mapping[str, Estimate]
    itl_caution: str | None
    transferred: int
    transfer_bytes: int
    fallbacks: Mapping[str, int]
    router_s_per_million_tokens: float | None
    sweep: SweepSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSummary:
    baseline: str
    validity: Validity
    variants: tuple[VariantSummary, ...]

    @property
    def shown(self) -> dict[str, ComparedMetric]:
        """The figures that at least one variant has."""
        return {k: x for k, x in FIGURES.items() if any(k in v.figures for v in self.variants)}

    def to_json(self) -> dict[str, Any]:
        """Return JSON. Its key for variants is `arms`, like the option `--arms`."""
        found = jsonable(self)
        return {("arms" if key == "variants" else key): value for key, value in found.items()}


def summarise_compare(result: CompareResult) -> CompareSummary:
    """Return the summary of a result."""
    figures = {
        x.name: [
            figures_of(summarise(m.records, result.slo_s), x.settings)
            for m in result.of(x.name, "round")
        ]
        for x in result.variants
    }
    base = figures[result.baseline]
    variants = tuple(_variant(result, x, figures[x.name], base) for x in result.variants)
    return CompareSummary(baseline=result.baseline, validity=judge(result), variants=variants)


def _variant(
    result: CompareResult,
    facts: VariantFacts,
    own: Sequence[Mapping[str, float]],
    baseline: Sequence[Mapping[str, float]],
) -> VariantSummary:
    """Return the summary of one variant. `own` and `baseline` have the figures of each round."""
    medians, ratios = {}, {}
    for key in FIGURES:
        if not own or not all(key in x for x in own):
            continue
        medians[key] = estimate([x[key] for x in own], f"{facts.name}/{key}")
        pairs = [(x[key], y[key]) for x, y in zip(own, baseline, strict=False) if key in y]
        if facts.name != result.baseline and len(pairs) == len(own):
            quotient = ratio(pairs, f"{facts.name}/{key}/ratio")
            if quotient is not None:
                ratios[key] = quotient
    rounds = result.of(facts.name, "round")
    whole = summarise([record for m in rounds for record in m.records])
    receipts = whole.receipts
    tokens = sum(record.completion_tokens or 0 for m in rounds for record in m.records)
    router_s = sum(m.processor.router_s or 0.0 for m in rounds)
    return VariantSummary(
        name=facts.name,
        **{name: getattr(whole, name) for name in _COUNTS},
        figures=medians,
        ratios=ratios,
        transferred=receipts.transferred if receipts else 0,
        transfer_bytes=receipts.totals["transfer_bytes"] if receipts else 0,
        fallbacks=receipts.counts["fallbacks"] if receipts else {},
        router_s_per_million_tokens=router_s / tokens * 1e6 if router_s and tokens else None,
        sweep=_sweep(result, facts),
    )


def _sweep(result: CompareResult, facts: VariantFacts) -> SweepSummary | None:
    probes = probes_of(result.of(facts.name, "probe"), result.slo_s)
    if not probes:
        return None
    passed, failed = bracket(probes)
    base, _ = bracket(probes_of(result.of(result.baseline, "probe"), result.slo_s))
    device, count = facts.settings.device if facts.settings else ("core", 0)
    at_best = [
        summarise(m.records, result.slo_s).slo
        for m in result.of(facts.name, "probe")
        if m.rate_per_s == passed
    ]
    return SweepSummary(
        probes=tuple(probes),
        passed=passed,
        failed=failed,
        per_device=passed / count if passed is not None and count else None,
        device=device,
        ratio=passed / base if passed is not None and base else None,
        cost=_cost(facts.settings, at_best[0].tokens_per_s) if at_best and at_best[0] else None,
    )
