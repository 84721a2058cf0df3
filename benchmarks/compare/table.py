"""A comparison as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.compare.sweep import ATTAINMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from benchmarks.bootstrap import Estimate
    from benchmarks.compare.result import ArmFacts, CompareResult
    from benchmarks.compare.settings import ArmSettings
    from benchmarks.compare.summary import ArmSummary, CompareSummary, Figure, SweepSummary


def render_compare(result: CompareResult, summary: CompareSummary, console: Console) -> None:
    """Print a comparison; the verdict on it comes first where it is bad."""
    for reason in summary.validity.invalid:
        console.print(f"INVALID: {reason}", style="bold red", markup=False, soft_wrap=True)
    for line in setup_lines(result):
        _line(console, line)
    if summary.shown:
        console.print(_figures_table(summary))
    if any(arm.sweep for arm in summary.arms):
        console.print(_sweep_table(summary))
    for line in arm_lines(summary):
        _line(console, line)
    for caution in summary.validity.cautions:
        _line(console, f"note: {caution}")


def setup_lines(result: CompareResult) -> list[str]:
    """What was sent, how it was scaled, and to what."""
    lines = [_traffic_line(result)]
    lines += [f"{arm.name}: {_arm_text(arm)}" for arm in result.arms]
    if result.slo_s:
        limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in result.slo_s.items())
        lines.append(f"limits: {limits}; a request that failed has missed them")
    return lines


def _traffic_line(result: CompareResult) -> str:
    name, settings = result.trace["name"], result.settings
    text = (
        f"{name} at {settings['rate_per_s']:g} requests/s, {settings['rounds']} rounds of "
        f"{settings['requests']}, lengths times {settings['scale_lengths']}"
    )
    cuts = [m.workload for m in result.measurements if m.kind == "round"] or [
        m.workload for m in result.measurements
    ]
    if cuts:
        # Rounds take different parts of the trace.
        mean_in = sum(cut["mean_input"] for cut in cuts) / len(cuts)
        mean_out = sum(cut["mean_output"] for cut in cuts) / len(cuts)
        speedups = [m.speedup for m in result.measurements if m.kind == "round"]
        text += (
            f": {mean_in:.0f} input and {mean_out:.0f} output tokens on average (the trace: "
            f"{cuts[0]['mean_input_before']:.0f} and {cuts[0]['mean_output_before']:.0f})"
        )
        if speedups:
            text += f", arrivals times {min(speedups):.2g} to {max(speedups):.2g}"
    return text


def _arm_text(arm: ArmFacts) -> str:
    if arm.settings is None:
        return f"{arm.model} behind an endpoint over {arm.face}, settings unknown"
    s = arm.settings
    workers = ", ".join(f"{count} {role}" for role, count in s.workers.items())
    chosen = ("engine", "dtype", "block_size", "max_num_batched_tokens", "cudagraph_mode")
    facts = [f"{name} {'/'.join(s.of_workers[name])}" for name in chosen if name in s.of_workers]
    return (
        f"{workers} on {machine_text(s)} over {arm.face}, {arm.model}, {', '.join(facts)}, "
        f"KV cache {s.kv_cache_tokens:,} tokens"
    )


def machine_text(settings: ArmSettings) -> str:
    """``2 cores``, or ``4 GPUs and 8 cores``."""
    gpus = f"{settings.gpus} GPU{'s' * (settings.gpus > 1)} and " if settings.gpus else ""
    return f"{gpus}{settings.cores} cores"


def _figures_table(summary: CompareSummary) -> Table:
    table = Table(
        caption="median over rounds [95 % interval]; times in ms; failures count as infinite; "
        f"ratios to {summary.baseline}, round by round",
        caption_justify="left",
    )
    table.add_column("")
    for arm in summary.arms:
        table.add_column(arm.name, justify="right")
        if arm.name != summary.baseline:
            table.add_column(f"/ {summary.baseline}", justify="right")
    for figure in summary.shown:
        cells = []
        for arm in summary.arms:
            cells.append(figure_text(figure, arm.figures.get(figure.key)))
            if arm.name != summary.baseline:
                cells.append(ratio_text(arm.ratios.get(figure.key)))
        table.add_row(unit_label(figure), *cells)
    return table


def unit_label(figure: Figure) -> str:
    """The figure's name with its unit."""
    return f"{figure.label}, ms" if figure.unit == "s" else figure.label


def figure_text(figure: Figure, found: Estimate | None) -> str:
    """``12.3 [11.9, 14.0]`` in the figure's own unit."""
    return "-" if found is None else _with_interval(found, lambda x: _number(figure.unit, x))


def ratio_text(found: Estimate | None) -> str:
    """``0.83 [0.79, 0.90]``."""
    return "-" if found is None else _with_interval(found, lambda x: f"{x:.2f}")


def _with_interval(found: Estimate, text: Callable[[float], str]) -> str:
    if found.low is None or found.high is None:
        return text(found.value)
    return f"{text(found.value)} [{text(found.low)}, {text(found.high)}]"


def _number(unit: str, value: float) -> str:
    if math.isinf(value):
        return "inf"
    if unit == "share":
        return f"{value:.0%}"
    shown = value * 1000 if unit == "s" else value
    return f"{shown:.2f}" if shown < 10 else f"{shown:.1f}" if shown < 1000 else f"{shown:,.0f}"


def _sweep_table(summary: CompareSummary) -> Table:
    table = Table(
        title=f"highest rate with {ATTAINMENT:.0%} attainment, requests/s",
        title_justify="left",
        caption="probes as rate: attainment, in the order they were made",
        caption_justify="left",
    )
    for name in ("", "rate", "each", f"/ {summary.baseline}", "probes"):
        table.add_column(name, justify="left" if name in ("", "probes") else "right")
    for arm in summary.arms:
        if arm.sweep is not None:
            table.add_row(arm.name, *_sweep_cells(arm.sweep))
    return table


def _sweep_cells(sweep: SweepSummary) -> list[str]:
    probes = ", ".join(f"{x.rate_per_s:.2f}: {x.attainment:.0%}" for x in sweep.probes)
    return [
        capacity_text(sweep),
        each_text(sweep),
        "-" if sweep.ratio is None else f"{sweep.ratio:.2f}",
        probes,
    ]


def each_text(sweep: SweepSummary) -> str:
    """The rate of one core, or of one GPU where there are any."""
    for found, what in ((sweep.per_gpu_per_s, "GPU"), (sweep.per_core_per_s, "core")):
        if found is not None:
            return f"{found:.2f} per {what}"
    return "-"


def capacity_text(sweep: SweepSummary) -> str:
    """The rate with where it was seen to fail: what was bracketed, and no more."""
    passed, failed = sweep.found.passed, sweep.found.failed
    if passed is None:
        return f"under {failed:.2f}" if failed is not None else "-"
    return f"{passed:.2f} (fails at {failed:.2f})" if failed else f"over {passed:.2f}"


def arm_lines(summary: CompareSummary) -> list[str]:
    """Failures, transfers, fallbacks, and how far chunks are tokens."""
    lines = []
    for arm in summary.arms:
        if arm.requests:
            lines.append(f"{arm.name}: {_requests_text(arm)}")
        lines += [f"{arm.name}: {count} x {error}" for error, count in arm.errors.items()]
    if not summary.has_itl:
        reasons = {arm.name: arm.itl_omitted for arm in summary.arms if arm.itl_omitted}
        lines += [f"no ITL: {name}: {reason}" for name, reason in reasons.items()]
    return lines


def _requests_text(arm: ArmSummary) -> str:
    text = f"{arm.ok} of {arm.requests} requests ok"
    if arm.failed or arm.timed_out:
        text += f", {arm.failed} failed, {arm.timed_out} timed out"
    if arm.transferred:
        text += f"; KV moved for {arm.transferred}, {arm.transfer_bytes / 2**20:.1f} MiB"
    if arm.fallbacks:
        used = ", ".join(f"{name} ({count})" for name, count in arm.fallbacks.items())
        text += f"; fallbacks: {used}"
    if arm.one_token_chunks is not None:
        text += f"; {arm.one_token_chunks:.1%} of chunks held one token"
    if arm.router_s_per_million_tokens is not None:
        cost = arm.router_s_per_million_tokens
        text += f"; router {cost:.0f} processor seconds per million tokens"
    return text


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
