"""report.html: one file that shows a comparison without a network or a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compare.run import ATTAINMENT
from benchmarks.compare.summary import summarise_compare
from benchmarks.report.figures import sections
from benchmarks.report.svg import Markup, tag
from benchmarks.report.tables import SWEEP_HEAD, figure_rows, setup_lines, sweep_rows, variant_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import CompareSummary, Figure
    from benchmarks.stats import Estimate

_STYLE = Path(__file__).with_name("style.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the browser refuses anything else


def render_page(result: CompareResult) -> str:
    """Return the report as HTML."""
    summary = summarise_compare(result)
    names = " and ".join(variant.name for variant in result.variants)
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
        tag("p", tag("span", result.created.replace("+00:00", " UTC")), class_="lead"),
        _verdict(summary),
        *_tables(summary),
        *sections(result, has_itl=summary.has_itl),
        tag("section", tag("h2", "How it was measured"), *_facts(result, summary)),
        tag("footer", "Made by pdserve bench compare; every figure follows from result.json."),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _verdict(summary: CompareSummary) -> Markup:
    invalid, cautions = summary.validity.invalid, summary.validity.cautions
    word, about = "Valid", "the variants are set alike and the client was on time."
    if invalid:
        word, about = "INVALID", "these figures must not be compared:"
    items = [tag("li", reason) for reason in invalid]
    items += [tag("li", caution, class_="note") for caution in cautions]
    return tag(
        "div",
        tag("strong", word),
        f": {about}",
        tag("ul", *items) if items else Markup(),
        class_="verdict invalid" if invalid else "verdict",
    )


def _tables(summary: CompareSummary) -> Iterator[Markup]:
    if summary.shown:
        head, texts = figure_rows(summary)
        rows = [tag("tr", *(tag("th", name) for name in head))]
        for figure, row in zip(summary.shown, texts, strict=True):
            kinds = [None, *_kinds(summary, figure)]
            cells = [_cell(text, kind) for text, kind in zip(row, kinds, strict=True)]
            rows.append(tag("tr", *cells))
        about = "median over rounds with its 95 % interval; coloured if the interval excludes 1"
        yield tag("div", tag("table", *rows), tag("p", about, class_="lead"), class_="scroll")
    if any(variant.sweep for variant in summary.variants):
        yield tag("h2", f"Highest rate with {ATTAINMENT:.0%} attainment, requests/s")
        rows = [tag("tr", *(tag("th", name) for name in SWEEP_HEAD))]
        rows += [tag("tr", *(tag("td", cell) for cell in row)) for row in sweep_rows(summary)]
        yield tag("div", tag("table", *rows), class_="scroll")


def _kinds(summary: CompareSummary, figure: Figure) -> Iterator[str | None]:
    """The CSS class of each cell: ratios that leave no doubt are coloured."""
    for variant in summary.variants:
        yield None
        if variant.name != summary.baseline:
            yield _judged(figure, variant.ratios.get(figure.key))


def _judged(figure: Figure, ratio: Estimate | None) -> str | None:
    if ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return None
    return "better" if (ratio.high < 1) == figure.less_is_better else "worse"


def _cell(text: str, kind: str | None) -> Markup:
    value, bracket, interval = text.partition(" [")
    small = tag("small", f" [{interval}") if bracket else Markup()
    return tag("td", value, small, class_=kind)


def _facts(result: CompareResult, summary: CompareSummary) -> list[Markup]:
    host = result.host
    machine = f"{host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores"
    if isinstance(host.get("memory_bytes"), int):
        machine += f", {host['memory_bytes'] / 2**30:.0f} GiB"
    lines = [*setup_lines(result), *variant_lines(summary), f"machine: {machine}"]
    return [tag("p", text) for text in lines]
