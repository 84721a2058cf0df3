"""report.html: one file that shows a comparison without a network or a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from benchmarks.compare.summary import ATTAINMENT, summarise_compare
from benchmarks.report.figures import Figures
from benchmarks.report.tables import SWEEP_HEAD, figure_rows, setup_lines, sweep_rows, variant_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import CompareSummary, Figure

_HERE = Path(__file__).parent


def render_page(result: CompareResult) -> str:
    """Return the report as HTML."""
    summary = summarise_compare(result)
    host = result.host
    machine = f"machine: {host.get('cpu', 'unknown')}, {host.get('cores', '?')} cores"
    if isinstance(host.get("memory_bytes"), int):
        machine += f", {host['memory_bytes'] / 2**30:.0f} GiB"
    names = " and ".join(variant.name for variant in result.variants)
    head, rows = figure_rows(summary)
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    ).get_template("report.html.j2")
    return page.render(
        title=f"{names} on {result.trace['name']}",
        style=(_HERE / "style.css").read_text(encoding="utf-8"),
        created=result.created.replace("+00:00", " UTC"),
        validity=summary.validity,
        head=head,
        rows=rows,
        kinds=[[None, *_kinds(summary, figure)] for figure in summary.shown],
        attainment=f"{ATTAINMENT:.0%}",
        sweep_head=SWEEP_HEAD,
        sweep=sweep_rows(summary),
        sections=Figures(result, has_itl=summary.has_itl).sections(),
        facts=[*setup_lines(result), *variant_lines(summary), machine],
    )


def _kinds(summary: CompareSummary, figure: Figure) -> Iterator[str | None]:
    """The CSS class of each cell: ratios whose interval excludes 1 are coloured."""
    for variant in summary.variants:
        yield None
        if variant.name != summary.baseline:
            ratio = variant.ratios.get(figure.key)
            low, high = (ratio.low, ratio.high) if ratio else (None, None)
            if low is None or high is None or low <= 1 <= high:
                yield None
            else:
                yield "better" if (high < 1) == figure.less_is_better else "worse"
