"""What an arm still keeps up with: goodput and attainment against the rate that was offered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.compare.html.figure import arm_key, arm_kind, figure, nothing
from benchmarks.compare.sweep import ATTAINMENT
from benchmarks.metrics import summarise
from benchmarks.plot.chart import Axis, Chart

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult
    from benchmarks.plot.chart import Point
    from benchmarks.plot.svg import Markup

_NO_LIMITS = "no limits were set: give --slo-ttft and --slo-tpot"


def goodput(result: CompareResult) -> Markup:
    """Requests a second that met every limit."""
    title = "Goodput against rate"
    if not result.slo_s:
        return nothing(title, _NO_LIMITS)
    return _against_rate(result, title, 0, "requests/s within the limits")


def attainment(result: CompareResult) -> Markup:
    """The share of requests that met every limit."""
    title = "SLO attainment against rate"
    if not result.slo_s:
        return nothing(title, _NO_LIMITS)
    return _against_rate(result, title, 1, "share of requests within the limits")


def _against_rate(result: CompareResult, title: str, which: int, label: str) -> Markup:
    found = {arm.name: _points(result, arm.name, which) for arm in result.arms}
    every = [point for points in found.values() for point in points]
    if not every:
        return nothing(title, "nothing was measured")
    heights = (0.0, 1.0) if which else tuple(y for _, y in every)
    chart = Chart(
        Axis("offered, requests/s", tuple(x for x, _ in every)), Axis(label, heights), title=title
    )
    if which:
        chart.level(ATTAINMENT, f"{ATTAINMENT:.0%}")
    else:
        end = min(chart.x.high, chart.y.high)
        chart.line([(0.0, 0.0), (end, end)], "ideal")
    for name, points in found.items():
        chart.line(points, arm_kind(result, name))
        chart.dots(
            points, arm_kind(result, name), [f"{name}: {x:.2f}/s, {y:.2f}" for x, y in points]
        )
    has_probes = any(m.kind == "probe" for m in result.measurements)
    about = "rounds and probes" if has_probes else "only the rounds' rate: --sweep makes it a curve"
    return figure(title, chart.svg(), arm_key(result), about=about)


def _points(result: CompareResult, arm: str, which: int) -> list[Point]:
    """By rate; replays at one rate are averaged."""
    by_rate: dict[float, list[float]] = {}
    for measurement in (*result.of(arm, "round"), *result.of(arm, "probe")):
        slo = summarise(measurement.records, result.slo_s).slo
        if slo is not None:
            value = slo.attainment if which else slo.goodput_per_s
            by_rate.setdefault(measurement.rate_per_s, []).append(value)
    return [(rate, sum(values) / len(values)) for rate, values in sorted(by_rate.items())]
