"""Distributions of latency, and latency over time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchmarks.compare.html.figure import arm_key, arm_kind, figure, nothing
from benchmarks.metrics import PER_REQUEST
from benchmarks.plot.chart import Axis, Chart
from benchmarks.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.plot.chart import Point
    from benchmarks.plot.svg import Markup
    from benchmarks.records import RequestRecord

_CURVE_POINTS: Final = 200
_BINS: Final = 40


@dataclass(frozen=True, slots=True)
class _Quantity:
    """``name`` is a per-request metric's, or ``gap``."""

    name: str
    title: str
    about: str


def cdfs(result: CompareResult, *, has_itl: bool) -> list[Markup]:
    """TTFT, TPOT, gaps and E2E of all requests of all rounds that ended well."""
    gap = "ITL" if has_itl else "Gaps between chunks (ICL)"
    quantities = (
        _Quantity("ttft", "TTFT", "time to first token, from sending"),
        _Quantity("tpot", "TPOT", "mean time per token after the first, by request"),
        _Quantity("gap", gap, "pooled over requests" if has_itl else "some chunks hold several"),
        _Quantity("e2e", "E2E", "from sending to the last token"),
    )
    return [_cdf(result, quantity) for quantity in quantities]


def _cdf(result: CompareResult, quantity: _Quantity) -> Markup:
    title = f"{quantity.title}, cumulative"
    samples = {
        arm.name: sorted(_values(good(result, arm.name), quantity.name)) for arm in result.arms
    }
    every = tuple(value for sample in samples.values() for value in sample)
    if not every:
        return nothing(title, "no request has one")
    chart = Chart(
        Axis(f"{quantity.title}, ms", every, is_log=max(every) > 20 * max(min(every), 1e-3)),
        Axis("share of requests", (0.0, 1.0)),
        title=title,
    )
    limit = result.slo_s.get(quantity.name)
    if limit is not None and limit * 1000 <= chart.x.high:
        chart.limit(limit * 1000, "limit")
    for name, sample in samples.items():
        chart.steps(_curve(sample), arm_kind(result, name))
    return figure(title, chart.svg(), arm_key(result), about=quantity.about)


def ttft_over_time(result: CompareResult) -> Markup:
    """Each request of every round, by when it was due."""
    title = "TTFT over time"
    found = {
        arm.name: [
            (record, value * 1000)
            for record in good(result, arm.name)
            if (value := PER_REQUEST["ttft"](record)) is not None
        ]
        for arm in result.arms
    }
    points = {
        name: [(record.scheduled_s, value) for record, value in sample]
        for name, sample in found.items()
    }
    every = [point for sample in points.values() for point in sample]
    if not every:
        return nothing(title, "no request was answered")
    chart = Chart(
        Axis("s since the round began", tuple(x for x, _ in every)),
        Axis("TTFT, ms", tuple(y for _, y in every)),
        title=title,
    )
    if (limit := result.slo_s.get("ttft")) is not None and limit * 1000 <= chart.y.high:
        chart.level(limit * 1000, "limit")
    for name, sample in found.items():
        hints = [f"{name}: {v:.1f} ms, {r.input_tokens} prompt tokens" for r, v in sample]
        chart.dots(points[name], arm_kind(result, name), hints)
    about = "all rounds laid over one another; one dot a request"
    return figure(title, chart.svg(), arm_key(result), about=about)


def gaps_over_time(result: CompareResult, *, has_itl: bool) -> Markup:
    """The median and the 99th percentile of the gaps that ended in each stretch of time."""
    title = "ITL over time" if has_itl else "Gaps between chunks over time"
    gaps = {arm.name: _timed_gaps(good(result, arm.name)) for arm in result.arms}
    every = [gap for sample in gaps.values() for gap in sample]
    if not every:
        return nothing(title, "no answer had two chunks")
    end_s = max(at_s for at_s, _ in every)
    binned = {name: _binned(sample, end_s) for name, sample in gaps.items()}
    shown = tuple(value for curves in binned.values() for curve in curves for _, value in curve)
    chart = Chart(
        Axis("s since the round began", (0.0, end_s)), Axis("ms", shown, is_log=True), title=title
    )
    for name, (middle, upper) in binned.items():
        chart.line(middle, arm_kind(result, name))
        chart.line(upper, f"{arm_kind(result, name)} thin")
    about = f"median (thick) and p99 (thin) in each {end_s / _BINS:.2g} s, all rounds together"
    return figure(title, chart.svg(), arm_key(result), about=about)


def good(result: CompareResult, arm: str) -> list[RequestRecord]:
    """All requests of an arm's rounds that ended well; of its probes, if it had no rounds."""
    measured = result.of(arm, "round") or result.of(arm, "probe")
    return [record for m in measured for record in m.records if record.status == "ok"]


def _values(records: Sequence[RequestRecord], name: str) -> list[float]:
    if name == "gap":
        return [gap for _, gap in _timed_gaps(records)]
    metric = PER_REQUEST[name]
    return [value * 1000 for record in records if (value := metric(record)) is not None]


def _timed_gaps(records: Sequence[RequestRecord]) -> list[Point]:
    """(end, length in ms) of every gap between chunks."""
    return [
        (later, (later - earlier) * 1000)
        for record in records
        for earlier, later in pairwise(record.chunk_s)
    ]


def _curve(ordered: Sequence[float]) -> list[Point]:
    """The empirical distribution, at so many points as can be told apart."""
    count = len(ordered)
    stride = max(1, count // _CURVE_POINTS)
    kept = sorted({*range(0, count, stride), count - 1}) if count else []
    return [(ordered[index], (index + 1) / count) for index in kept]


def _binned(sample: Sequence[Point], end_s: float) -> tuple[list[Point], list[Point]]:
    bins: dict[int, list[float]] = {}
    width_s = end_s / _BINS
    for at_s, value in sample:
        bins.setdefault(min(_BINS - 1, int(at_s / width_s)), []).append(value)
    middle, upper = [], []
    for number, values in sorted(bins.items()):
        ordered = sorted(values)
        at_s = (number + 0.5) * width_s
        middle.append((at_s, percentile(ordered, 50)))
        upper.append((at_s, percentile(ordered, 99)))
    return middle, upper
