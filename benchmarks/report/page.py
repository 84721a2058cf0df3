"""report.html: a comparison in one file, without scripts or external files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from benchmarks.compare.summary import ATTAINMENT, summarise_compare
from benchmarks.report.figures import sections
from benchmarks.report.tables import SWEEP_HEAD, figure_rows, setup_lines, sweep_rows, variant_lines

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult

_HERE = Path(__file__).parent


def render_page(result: CompareResult) -> str:
    """Return the report as HTML."""
    summary, host = summarise_compare(result), result.host
    machine = f"machine: {host['cpu']}, {host['cores']} cores, {host['memory_bytes'] >> 30} GiB"
    head, rows = figure_rows(summary)
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    ).get_template("report.html.j2")
    return page.render(
        title=f"{' and '.join(x.name for x in result.variants)} on {result.trace['name']}",
        style=(_HERE / "style.css").read_text(encoding="utf-8"),
        created=result.created.replace("+00:00", " UTC"),
        validity=summary.validity,
        head=head,
        rows=rows,
        attainment=f"{ATTAINMENT:.0%}",
        sweep_head=SWEEP_HEAD,
        sweep=[[(text, "") for text in row] for row in sweep_rows(summary)],
        sections=sections(result),
        facts=[*setup_lines(result), *variant_lines(summary), machine],
    )
