"""The README's table of figures, made from a kept run and from nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import (
    capacity_text,
    figure_text,
    machine_text,
    ratio_text,
    unit_label,
)
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult
    from benchmarks.compare.summary import CompareSummary
    from benchmarks.standard.sets import StandardResult

BEGIN: Final = "<!-- made by make bench: begin -->"
END: Final = "<!-- made by make bench: end -->"
_SHOWN: Final = (
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "tt2t_p50",
    "itl_p99",
    "icl_p99",
    "goodput",
    "output_tokens_per_core",
    "output_tokens_per_gpu",
)


def with_table(readme: str, run: StandardResult | None) -> str:
    """``readme`` with the run's table between the markers; raises :class:`BenchError` where they
    are missing."""
    return between(readme, BEGIN, END, table(run))


def between(readme: str, begin: str, end: str, text: str) -> str:
    """``readme`` with ``text`` between two markers; raises :class:`BenchError` where they are
    missing."""
    before, found, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise BenchError(f"README.md lacks its markers {begin} and {end}")
    return f"{before}{begin}\n{text}{end}{after}"


def table(run: StandardResult | None) -> str:
    """The figures in Markdown."""
    if run is None:
        return "No run is kept yet.\n"
    return "\n".join(part for name, x in run.results.items() for part in _of_set(name, x)) + "\n"


def _of_set(name: str, result: CompareResult) -> list[str]:
    summary = summarise_compare(result)
    others = [arm for arm in summary.arms if arm.name != summary.baseline]
    base = next(arm for arm in summary.arms if arm.name == summary.baseline)
    heads = [name, *(x for arm in others for x in (arm.name, f"/ {base.name}")), base.name]
    lines = [
        _about(result, summary),
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
    ]
    for figure in summary.shown:
        if figure.key not in _SHOWN:
            continue
        cells = [unit_label(figure)]
        for arm in others:
            cells.append(figure_text(figure, arm.figures.get(figure.key)))
            cells.append(ratio_text(arm.ratios.get(figure.key)))
        cells.append(figure_text(figure, base.figures.get(figure.key)))
        lines.append(f"| {' | '.join(cells)} |")
    if base.sweep is not None:
        cells = ["highest rate with 90% in the limits, requests/s"]
        for arm in others:
            assert arm.sweep is not None, "every arm is swept, or none"
            cells.append(capacity_text(arm.sweep))
            cells.append("-" if arm.sweep.ratio is None else f"{arm.sweep.ratio:.2f}")
        lines.append(f"| {' | '.join([*cells, capacity_text(base.sweep)])} |")
    return [*lines, ""]


def _about(result: CompareResult, summary: CompareSummary) -> str:
    settings, arms = result.settings, result.arms
    known = [arm.settings for arm in arms if arm.settings is not None]
    machine = machine_text(known[0]) if known else "unknown cores"
    limits = ", ".join(f"{name.upper()} {x * 1000:g} ms" for name, x in result.slo_s.items())
    rounds = (
        f"{settings['rate_per_s']:g} requests/s, {settings['rounds']} rounds of "
        f"{settings['requests']}; "
    )
    text = (
        f"`{result.trace['name']}`, lengths times {settings['scale_lengths']}"
        f"{f', {rounds}' if settings['rounds'] else '; '}{arms[0].model}; {machine} an arm of "
        f"{result.host.get('cores')} ({result.host.get('cpu')}); limits {limits}; "
        f"{result.created[:10]}."
    )
    said = [*(f"INVALID: {x}" for x in summary.validity.invalid), *summary.validity.cautions]
    return text + "".join(f" {reason[0].upper()}{reason[1:]}." for reason in said)
