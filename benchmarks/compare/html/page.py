"""The whole report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compare.html import latency, load, phases
from benchmarks.compare.html.figure import section
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.sweep import ATTAINMENT
from benchmarks.compare.table import (
    arm_lines,
    capacity_text,
    each_text,
    figure_text,
    ratio_text,
    setup_lines,
    unit_label,
)
from benchmarks.plot.svg import Markup, join, tag

if TYPE_CHECKING:
    from benchmarks.bootstrap import Estimate
    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import CompareSummary, Figure

_STYLE = Path(__file__).with_name("style.css")
# Should something ever slip in that would load, the browser refuses it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(result: CompareResult) -> str:
    """The report as HTML; it loads nothing and runs nothing."""
    summary = summarise_compare(result)
    names = " and ".join(arm.name for arm in result.arms)
    title = f"{names} on {result.trace['name']}"
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{title} · pdserve"),
        tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("h1", title),
        tag("p", join([tag("span", result.created.replace("+00:00", " UTC"))]), class_="lead"),
        _verdict(summary),
        *_tables(summary),
        *_sections(result, summary),
        tag("section", tag("h2", "How it was measured"), *_facts(result, summary)),
        tag("footer", "Made by pdserve bench compare; every figure follows from result.json."),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _sections(result: CompareResult, summary: CompareSummary) -> list[Markup]:
    has_itl = summary.has_itl
    return [
        section("Latency", *latency.cdfs(result, has_itl=has_itl)),
        section(
            "Over time",
            latency.ttft_over_time(result),
            latency.gaps_over_time(result, has_itl=has_itl),
        ),
        section("Under load", load.goodput(result), load.attainment(result)),
        section("Where the time went", phases.phase_bars(result), phases.kv_moved(result)),
        section("On the workers", *phases.gantts(result)),
    ]


def _verdict(summary: CompareSummary) -> Markup:
    invalid, cautions = summary.validity.invalid, summary.validity.cautions
    if invalid:
        word, about = "INVALID", "these figures must not be compared:"
    else:
        word, about = "Valid", "the arms are set alike and the client was on time."
    items = [tag("li", reason) for reason in invalid]
    items += [tag("li", caution, class_="note") for caution in cautions]
    return tag(
        "div",
        tag("strong", word),
        f": {about}",
        tag("ul", *items) if items else Markup(),
        class_="verdict invalid" if invalid else "verdict",
    )


def _tables(summary: CompareSummary) -> list[Markup]:
    tables = []
    if summary.shown:
        tables.append(_figures(summary))
    if any(arm.sweep for arm in summary.arms):
        tables += [
            tag("h2", f"Highest rate with {ATTAINMENT:.0%} attainment"),
            _capacities(summary),
        ]
    return tables


def _figures(summary: CompareSummary) -> Markup:
    heads = [tag("th", "")]
    for arm in summary.arms:
        heads.append(tag("th", arm.name))
        if arm.name != summary.baseline:
            heads.append(tag("th", f"{arm.name} / {summary.baseline}"))
    rows = [tag("tr", *heads)]
    for shown in summary.shown:
        cells = [tag("td", unit_label(shown))]
        for arm in summary.arms:
            cells.append(_cell(figure_text(shown, arm.figures.get(shown.key))))
            if arm.name != summary.baseline:
                found = arm.ratios.get(shown.key)
                cells.append(_cell(ratio_text(found), _judged(shown, found)))
        rows.append(tag("tr", *cells))
    about = "median over rounds with its 95 % interval; coloured where that leaves no doubt"
    return tag("div", tag("table", *rows), tag("p", about, class_="lead"), class_="scroll")


def _cell(text: str, kind: str | None = None) -> Markup:
    value, bracket, interval = text.partition(" [")
    small = tag("small", f" [{interval}") if bracket else Markup()
    return tag("td", value, small, class_=kind)


def _judged(shown: Figure, ratio: Estimate | None) -> str | None:
    """Better or worse than the baseline, where the interval leaves out equality."""
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return None
    return "better" if (ratio.high < 1) == shown.less_is_better else "worse"


def _capacities(summary: CompareSummary) -> Markup:
    names = ("", "requests/s", "each", f"/ {summary.baseline}", "probes, rate: attainment")
    rows = [tag("tr", *(tag("th", name) for name in names))]
    for arm in summary.arms:
        if arm.sweep is None:
            continue
        probes = ", ".join(f"{x.rate_per_s:.2f}: {x.attainment:.0%}" for x in arm.sweep.probes)
        ratio = arm.sweep.ratio
        cells = [
            arm.name,
            capacity_text(arm.sweep),
            each_text(arm.sweep),
            "-" if ratio is None else f"{ratio:.2f}",
            probes,
        ]
        rows.append(tag("tr", *(tag("td", cell) for cell in cells)))
    return tag("div", tag("table", *rows), class_="scroll")


def _facts(result: CompareResult, summary: CompareSummary) -> list[Markup]:
    host = result.host
    memory = host.get("memory_bytes")
    machine = f"{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores"
    if isinstance(memory, int):
        machine += f", {memory / 2**30:.0f} GiB"
    lines = [*setup_lines(result), *arm_lines(summary), f"machine: {machine}"]
    return [tag("p", line) for line in lines]
