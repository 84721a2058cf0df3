"""What a comparison comes to: a pure function of its result.

A figure of an arm is the median over rounds of that round's figure; a ratio is the median over
rounds of the quotient of two arms in the same round. Both have bootstrap intervals. Percentiles of
a round count requests that failed as infinitely slow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.bootstrap import Estimate, estimate, ratio
from benchmarks.compare.sweep import Bracket, Probe, bracket
from benchmarks.compare.validity import Validity, judge
from benchmarks.metrics import Summary, summarise
from benchmarks.receipts import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.compare.result import ArmFacts, CompareResult, Measurement
    from benchmarks.compare.settings import ArmSettings
    from benchmarks.stats import Distribution

    Of = Callable[[Summary, ArmSettings | None], float | None]
    Per = Callable[[float | None, ArmSettings | None], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the comparison. ``unit`` is ``s``, ``share`` or ``per_s``."""

    key: str
    label: str
    unit: str
    less_is_better: bool
    of: Of


def _adjusted(name: str, percentile: str) -> Of:
    return lambda summary, _arm: _get(summary.adjusted[name], percentile)


def _gap(name: str, percentile: str) -> Of:
    return lambda summary, _arm: _get(getattr(summary, name), percentile)


def _get(found: Distribution | None, percentile: str) -> float | None:
    return None if found is None else float(getattr(found, percentile))


def _per_core(value: float | None, arm: ArmSettings | None) -> float | None:
    """Nothing where GPUs do the work."""
    return None if value is None or arm is None or arm.gpus or not arm.cores else value / arm.cores


def _per_gpu(value: float | None, arm: ArmSettings | None) -> float | None:
    return None if value is None or arm is None or not arm.gpus else value / arm.gpus


def _attainment(summary: Summary, _arm: ArmSettings | None) -> float | None:
    return None if summary.slo is None else summary.slo.attainment


def _goodput(summary: Summary, _arm: ArmSettings | None) -> float | None:
    return None if summary.slo is None else summary.slo.goodput_per_s


def _output_tokens(summary: Summary, _arm: ArmSettings | None) -> float:
    return summary.output_tokens_per_s


def _each(of: Of, per: Per) -> Of:
    return lambda summary, arm: per(of(summary, arm), arm)


_LATENCIES: Final = (("ttft", "TTFT"), ("tpot", "TPOT"), ("tt2t", "TT2T"), ("e2e", "E2E"))
_GAPS: Final = (("itl", "ITL"), ("icl", "ICL (gaps between chunks)"))
_EACH: Final = (("core", _per_core), ("GPU", _per_gpu))

FIGURES: Final[tuple[Figure, ...]] = (
    *(
        Figure(
            key=f"{name}_{p}",
            label=f"{label} {p}",
            unit="s",
            less_is_better=True,
            of=_adjusted(name, p),
        )
        for name, label in _LATENCIES
        for p in ("p50", "p99")
    ),
    *(
        Figure(
            key=f"{name}_{p}", label=f"{label} {p}", unit="s", less_is_better=True, of=_gap(name, p)
        )
        for name, label in _GAPS
        for p in ("p50", "p99")
    ),
    Figure(
        key="attainment",
        label="SLO attainment",
        unit="share",
        less_is_better=False,
        of=_attainment,
    ),
    Figure(
        key="goodput", label="goodput, requests/s", unit="per_s", less_is_better=False, of=_goodput
    ),
    *(
        Figure(
            key=f"goodput_per_{what.lower()}",
            label=f"goodput, requests/s per {what}",
            unit="per_s",
            less_is_better=False,
            of=_each(_goodput, per),
        )
        for what, per in _EACH
    ),
    Figure(
        key="output_tokens",
        label="output tokens/s",
        unit="per_s",
        less_is_better=False,
        of=_output_tokens,
    ),
    *(
        Figure(
            key=f"output_tokens_per_{what.lower()}",
            label=f"output tokens/s per {what}",
            unit="per_s",
            less_is_better=False,
            of=_each(_output_tokens, per),
        )
        for what, per in _EACH
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """An arm's probes in the order they were made, and what they say together."""

    probes: tuple[Probe, ...]
    found: Bracket
    per_core_per_s: float | None
    per_gpu_per_s: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm over all rounds. ``figures`` and ``ratios`` (to the baseline) are by a figure's key,
    and lack what cannot be said.

    ``one_token_chunks`` is the share of chunks that held one token, None where chunks do not tell;
    ``itl_omitted`` says why there is no ITL. ``phases_s`` are means, by the receipts.
    """

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
    """The whole comparison. ``has_itl`` is whether every arm's chunks held one token each, so that
    gaps between chunks are gaps between tokens."""

    baseline: str
    validity: Validity
    has_itl: bool
    arms: tuple[ArmSummary, ...]

    @property
    def shown(self) -> list[Figure]:
        """The figures that some arm has; of ITL and ICL the one that is exact."""
        hidden = "icl" if self.has_itl else "itl"
        return [
            figure
            for figure in FIGURES
            if not figure.key.startswith(hidden)
            and any(figure.key in arm.figures for arm in self.arms)
        ]


def summarise_compare(result: CompareResult) -> CompareSummary:
    """Sum up a result."""
    rounds = {arm.name: _summaries(result, arm) for arm in result.arms}
    sweeps = {arm.name: _probes(result, arm) for arm in result.arms}
    base = sweeps[result.baseline]
    arms = tuple(
        _arm_summary(
            result,
            arm,
            rounds=rounds,
            sweep=_sweep(sweeps[arm.name], arm.settings, bracket(base).passed if base else None),
        )
        for arm in result.arms
    )
    return CompareSummary(
        baseline=result.baseline,
        validity=judge(result),
        has_itl=all(arm.itl_omitted is None for arm in arms),
        arms=arms,
    )


def _summaries(result: CompareResult, arm: ArmFacts) -> list[Summary]:
    return [summarise(m.records, result.slo_s) for m in result.of(arm.name, "round")]


def _arm_summary(
    result: CompareResult,
    arm: ArmFacts,
    *,
    rounds: Mapping[str, Sequence[Summary]],
    sweep: SweepSummary | None,
) -> ArmSummary:
    own = rounds[arm.name]
    measured = result.of(arm.name, "round")
    settings = {facts.name: facts.settings for facts in result.arms}
    figures, ratios = {}, {}
    for figure in FIGURES:
        values = [figure.of(summary, settings[arm.name]) for summary in own]
        baseline = settings[result.baseline]
        base = [figure.of(summary, baseline) for summary in rounds[result.baseline]]
        found = _estimate(values, f"{arm.name}/{figure.key}")
        if found is not None:
            figures[figure.key] = found
        quotient = _ratio(values, base, f"{arm.name}/{figure.key}/ratio")
        if quotient is not None and arm.name != result.baseline:
            ratios[figure.key] = quotient
    receipts = [x.receipts for x in own if x.receipts is not None]
    errors: Counter[str] = Counter()
    for summary in own:
        errors.update(summary.errors)
    return ArmSummary(
        name=arm.name,
        requests=sum(x.requests for x in own),
        ok=sum(x.ok for x in own),
        failed=sum(x.failed for x in own),
        timed_out=sum(x.timed_out for x in own),
        errors=dict(errors),
        figures=figures,
        ratios=ratios,
        one_token_chunks=_one_token_chunks(measured),
        itl_omitted=next((x.itl_omitted for x in own if x.itl_omitted), None),
        phases_s=_phases(measured),
        transferred=sum(x.transferred for x in receipts),
        transfer_bytes=sum(x.totals["transfer_bytes"] for x in receipts),
        fallbacks=dict(sum((Counter(x.fallbacks) for x in receipts), Counter())),
        router_s_per_million_tokens=_router_cost(measured),
        sweep=sweep,
    )


def _estimate(values: Sequence[float | None], key: str) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known, key) if len(known) == len(values) else None


def _ratio(
    values: Sequence[float | None], base: Sequence[float | None], key: str
) -> Estimate | None:
    pairs = [(top, bottom) for top, bottom in zip(values, base, strict=False)]
    known = [(top, bottom) for top, bottom in pairs if top is not None and bottom is not None]
    return ratio(known, key) if known and len(known) == len(pairs) else None


def _one_token_chunks(measured: Sequence[Measurement]) -> float | None:
    good = [r for m in measured for r in m.records if r.status == "ok"]
    if not good or any(record.chunk_tokens is None for record in good):
        return None
    counts = [count for record in good for count in record.chunk_tokens or ()]
    return sum(count == 1 for count in counts) / len(counts)


def _phases(measured: Sequence[Measurement]) -> dict[str, float]:
    receipts = [r.receipt for m in measured for r in m.records if r.receipt is not None]
    return {
        name: fmean(_number(receipt, name) for receipt in receipts) for name in PHASES if receipts
    }


def _number(receipt: Mapping[str, Any], name: str) -> float:
    value = receipt.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _router_cost(measured: Sequence[Measurement]) -> float | None:
    tokens = sum(r.completion_tokens or 0 for m in measured for r in m.records)
    spent = [m.processor.router_s for m in measured]
    known = [value for value in spent if value is not None]
    if not tokens or len(known) != len(spent):
        return None
    return sum(known) / tokens * 1e6


def _probes(result: CompareResult, arm: ArmFacts) -> list[Probe]:
    found = []
    for measurement in result.of(arm.name, "probe"):
        slo = summarise(measurement.records, result.slo_s).slo
        assert slo is not None, "a sweep has limits"
        found.append(Probe(measurement.rate_per_s, slo.attainment))
    return found


def _sweep(
    probes: Sequence[Probe], arm: ArmSettings | None, base: float | None
) -> SweepSummary | None:
    if not probes:
        return None
    found = bracket(probes)
    return SweepSummary(
        probes=tuple(probes),
        found=found,
        per_core_per_s=_per_core(found.passed, arm),
        per_gpu_per_s=_per_gpu(found.passed, arm),
        ratio=found.passed / base if found.passed is not None and base else None,
    )
