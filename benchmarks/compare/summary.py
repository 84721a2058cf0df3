"""The figures of a comparison, computed from its result.

A figure is the median over rounds, a ratio the median over rounds of the quotient with the baseline
in the same round. Percentiles of a round count failed requests as infinitely slow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.fairness import Validity, judge
from benchmarks.compare.run import Probe, bracket
from benchmarks.metrics import PHASES, Summary, receipt_number, summarise
from benchmarks.replay import jsonable
from benchmarks.stats import Estimate, estimate, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult, Measurement, VariantFacts, VariantSettings


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the comparison. `unit` is `s`, `share` or `per_s`."""

    key: str
    label: str
    unit: str

    @property
    def less_is_better(self) -> bool:
        return self.unit == "s"


_LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "tt2t": "TT2T", "e2e": "E2E"}
_GAPS: Final = {"itl": "ITL", "icl": "ICL (gaps between chunks)"}
FIGURES: Final = (
    *(
        Figure(f"{name}_{p}", f"{label} {p}", "s")
        for name, label in (_LATENCIES | _GAPS).items()
        for p in ("p50", "p99")
    ),
    Figure("attainment", "SLO attainment", "share"),
    Figure("goodput", "goodput, requests/s", "per_s"),
    Figure("goodput_per_core", "goodput, requests/s per core", "per_s"),
    Figure("goodput_per_gpu", "goodput, requests/s per GPU", "per_s"),
    Figure("output_tokens", "output tokens/s", "per_s"),
    Figure("output_tokens_per_core", "output tokens/s per core", "per_s"),
    Figure("output_tokens_per_gpu", "output tokens/s per GPU", "per_s"),
)


def figures_of(summary: Summary, settings: VariantSettings | None) -> dict[str, float]:
    """Return the figures of one round by key, without those it does not define."""
    found: dict[str, float] = {}
    for name in _LATENCIES:
        sample = summary.adjusted[name]
        if sample is not None:
            found |= {f"{name}_p50": sample.p50, f"{name}_p99": sample.p99}
    for name, sample in (("itl", summary.itl), ("icl", summary.icl)):
        if sample is not None:
            found |= {f"{name}_p50": sample.p50, f"{name}_p99": sample.p99}
    found["output_tokens"] = summary.output_tokens_per_s
    if summary.slo is not None:
        found["attainment"] = summary.slo.attainment
        found["goodput"] = summary.slo.goodput_per_s
    what, count = _device(settings)
    if count:
        for name in ("goodput", "output_tokens"):
            if name in found:
                found[f"{name}_per_{what}"] = found[name] / count
    return found


def _device(settings: VariantSettings | None) -> tuple[str, int]:
    """What does the work, and how many there are."""
    if settings is None:
        return "core", 0
    return ("gpu", settings.gpus) if settings.gpus else ("core", settings.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """The probes of a variant. `passed` is the highest rate that passed below every failure."""

    probes: tuple[Probe, ...]
    passed: float | None
    failed: float | None
    per_device: float | None
    device: str
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """One variant over all rounds. `figures` and `ratios` are by a figure's key and lack what is
    not defined. `phases_s` are means of the receipts."""

    name: str
    requests: int
    ok: int
    failed: int
    timed_out: int
    errors: Mapping[str, int]
    figures: Mapping[str, Estimate]
    ratios: Mapping[str, Estimate]
    one_token_chunks: float | None
    itl_omitted: str | None
    phases_s: Mapping[str, float]
    transferred: int
    transfer_bytes: int
    fallbacks: Mapping[str, int]
    router_s_per_million_tokens: float | None
    sweep: SweepSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSummary:
    """The comparison. `has_itl` says that every chunk held one token, so that gaps between chunks
    are gaps between tokens."""

    baseline: str
    validity: Validity
    has_itl: bool
    variants: tuple[VariantSummary, ...]

    @property
    def shown(self) -> list[Figure]:
        """The figures that some variant has; of ITL and ICL the exact one."""
        hidden = "icl" if self.has_itl else "itl"
        return [
            figure
            for figure in FIGURES
            if not figure.key.startswith(hidden)
            and any(figure.key in variant.figures for variant in self.variants)
        ]


def to_json(summary: CompareSummary) -> dict[str, Any]:
    """Return the summary as JSON. Its key for variants is `arms`, as the option is `--arms`."""
    return {
        ("arms" if key == "variants" else key): value for key, value in jsonable(summary).items()
    }


def summarise_compare(result: CompareResult) -> CompareSummary:
    """Sum up a result."""
    rounds = {
        x.name: [summarise(m.records, result.slo_s) for m in result.of(x.name, "round")]
        for x in result.variants
    }
    figures = {
        x.name: [figures_of(summary, x.settings) for summary in rounds[x.name]]
        for x in result.variants
    }
    base = bracket(_probes(result, result.baseline))[0]
    variants = tuple(
        _variant(result, x, rounds[x.name], figures[x.name], figures[result.baseline], base)
        for x in result.variants
    )
    return CompareSummary(
        baseline=result.baseline,
        validity=judge(result),
        has_itl=all(variant.itl_omitted is None for variant in variants),
        variants=variants,
    )


def _variant(
    result: CompareResult,
    facts: VariantFacts,
    own: Sequence[Summary],
    figures: Sequence[Mapping[str, float]],
    baseline: Sequence[Mapping[str, float]],
    base_rate: float | None,
) -> VariantSummary:
    name = facts.name
    medians, ratios = {}, {}
    for figure in FIGURES:
        key = figure.key
        values = [x[key] for x in figures if key in x]
        if not values or len(values) < len(figures):
            continue
        if (found := estimate(values, f"{name}/{key}")) is not None:
            medians[key] = found
        pairs = [(x[key], y[key]) for x, y in zip(figures, baseline, strict=False) if key in y]
        if name != result.baseline and len(pairs) == len(values):
            quotient = ratio(pairs, f"{name}/{key}/ratio")
            if quotient is not None:
                ratios[key] = quotient
    measured = result.of(name, "round")
    receipts = [x.receipts for x in own if x.receipts is not None]
    raw = [r.receipt for m in measured for r in m.records if r.receipt is not None]
    return VariantSummary(
        name=name,
        requests=sum(x.requests for x in own),
        ok=sum(x.ok for x in own),
        failed=sum(x.failed for x in own),
        timed_out=sum(x.timed_out for x in own),
        errors=dict(sum((Counter(x.errors) for x in own), Counter())),
        figures=medians,
        ratios=ratios,
        one_token_chunks=_one_token_chunks(measured),
        itl_omitted=next((x.itl_omitted for x in own if x.itl_omitted), None),
        phases_s={p: fmean(receipt_number(x, p) for x in raw) for p in PHASES if raw},
        transferred=sum(x.transferred for x in receipts),
        transfer_bytes=sum(x.totals["transfer_bytes"] for x in receipts),
        fallbacks=dict(sum((Counter(x.fallbacks) for x in receipts), Counter())),
        router_s_per_million_tokens=_router_cost(measured),
        sweep=_sweep(_probes(result, name), facts.settings, base_rate),
    )


def _one_token_chunks(measured: Sequence[Measurement]) -> float | None:
    good = [r for m in measured for r in m.records if r.status == "ok"]
    if not good or any(record.chunk_tokens is None for record in good):
        return None
    counts = [count for record in good for count in record.chunk_tokens or ()]
    return sum(count == 1 for count in counts) / len(counts)


def _router_cost(measured: Sequence[Measurement]) -> float | None:
    tokens = sum(r.completion_tokens or 0 for m in measured for r in m.records)
    spent = [m.processor.router_s for m in measured]
    known = [value for value in spent if value is not None]
    return sum(known) / tokens * 1e6 if tokens and len(known) == len(spent) else None


def _probes(result: CompareResult, name: str) -> list[Probe]:
    found = []
    for measurement in result.of(name, "probe"):
        slo = summarise(measurement.records, result.slo_s).slo
        assert slo is not None, "a sweep has limits"
        found.append(Probe(measurement.rate_per_s, slo.attainment))
    return found


def _sweep(
    probes: Sequence[Probe], settings: VariantSettings | None, base: float | None
) -> SweepSummary | None:
    if not probes:
        return None
    passed, failed = bracket(probes)
    what, count = _device(settings)
    return SweepSummary(
        probes=tuple(probes),
        passed=passed,
        failed=failed,
        per_device=passed / count if passed is not None and count else None,
        device="GPU" if what == "gpu" else what,
        ratio=passed / base if passed is not None and base else None,
    )
