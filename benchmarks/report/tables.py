"""Results as tables on the terminal, and the texts that report.html shows with them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.summary import ATTAINMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult, VariantFacts
    from benchmarks.compare.summary import CompareSummary, Figure, SweepSummary, VariantSummary
    from benchmarks.metrics import ReceiptSummary, Summary
    from benchmarks.replay import ReplayResult
    from benchmarks.stats import Distribution, Estimate

_LABELS = {
    "ttft": "TTFT from sending",
    "ttft_sched": "TTFT from schedule",
    "tpot": "TPOT",
    "tt2t": "TT2T (token 1 to 2)",
    "e2e": "E2E from sending",
    "e2e_sched": "E2E from schedule",
}
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
_SHOWN_ERRORS = 5
SWEEP_HEAD = ["", "rate", "each", "ratio", "probes"]


class Printer:
    """Prints tables and lines on standard output."""

    def __init__(self) -> None:
        # Without a terminal rich assumes 80 columns and folds tables.
        self._console = Console() if sys.stdout.isatty() else Console(width=160)

    def line(self, text: str, style: str = "") -> None:
        console = self._console
        console.print(text, style=style or None, highlight=False, markup=False, soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str | None = None,
        caption: str | None = None,
    ) -> None:
        """Print a table with its first column on the left and numbers on the right."""
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, str) else number_text(cell) for cell in row))
        self._console.print(table)


def number_text(value: Any) -> str:
    """Write a number with three significant digits."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "inf"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# -- one replay


def render_replay(result: ReplayResult) -> None:
    """Print the figures of one replay."""
    summary, target, out = result.summary(), result.target, Printer()
    out.line(f"{result.trace['name']} on {target['name']} at {target['address']}")
    rows = [
        [label, *_cells(summary.latency[name]), *_cells(summary.adjusted[name], ("p99",))]
        for name, label in _LABELS.items()
    ]
    rows.append(["ICL (between chunks)", *_cells(summary.icl), ""])
    if summary.itl is not None:
        rows.append(["ITL", *_cells(summary.itl), ""])
    rows.append(["client lag", *_cells(summary.lag), ""])
    caption = "milliseconds; adj p99 counts failures as infinite"
    out.table(["", *_PERCENTILES, "adj p99"], rows, caption=caption)
    for text in _replay_lines(summary):
        out.line(text)
    if summary.receipts is not None:
        _render_receipts(summary.receipts, out)
    for error, count in list(summary.errors.items())[:_SHOWN_ERRORS]:
        out.line(f"{count} x {error}")
    if len(summary.errors) > _SHOWN_ERRORS:
        out.line(f"and {len(summary.errors) - _SHOWN_ERRORS} other errors")
    if summary.degraded:
        out.line(f"DEGRADED: {summary.degraded}")


def _cells(found: Distribution | None, names: Sequence[str] = _PERCENTILES) -> list[str]:
    return ["-" if found is None else ms(getattr(found, name)) for name in names]


def ms(seconds: float) -> str:
    if math.isinf(seconds):
        return "inf"
    return f"{seconds * 1000:.2f}" if seconds < 0.01 else f"{seconds * 1000:.1f}"


def _replay_lines(summary: Summary) -> list[str]:
    ended = f"ok {summary.ok}, failed {summary.failed}, timed out {summary.timed_out}"
    rates = (
        f"offered {summary.offered_per_s:.2f}/s, completed {summary.completed_per_s:.2f}/s over "
        f"{summary.window_s:.1f} s; input {summary.input_tokens_per_s:.0f} tokens/s, output "
        f"{summary.output_tokens_per_s:.0f} tokens/s"
    )
    lines = [f"requests: {summary.requests}, {ended}", f"rates: {rates}"]
    if summary.itl_omitted:
        lines.append(f"no ITL: {summary.itl_omitted}")
    if summary.slo is not None:
        limits = ", ".join(f"{k} <= {ms(limit)} ms" for k, limit in summary.slo.limits_s.items())
        lines.append(
            f"SLO {limits}: attained by {summary.slo.attainment:.1%} of all requests, goodput "
            f"{summary.slo.goodput_per_s:.2f}/s"
        )
    return lines


def _render_receipts(receipts: ReceiptSummary, out: Printer) -> None:
    rows = [
        [name.removesuffix("_s").replace("_", " "), *_cells(found)]
        for name, found in receipts.phases.items()
    ]
    caption = "milliseconds, as the server reports them"
    out.table(["phase", *_PERCENTILES], rows, caption=caption)
    totals = receipts.totals
    out.line(
        f"transfers: {receipts.transferred} of {receipts.receipts} requests, "
        f"{totals['transfer_bytes'] / 2**20:.1f} MiB in {totals['transfer_blocks']} blocks; "
        f"{totals['cached_tokens']} prompt tokens were cached"
    )
    out.line(
        f"prefill on {_tally(receipts.prefill_workers)}; decode on "
        f"{_tally(receipts.decode_workers)}; first token from "
        f"{_tally(receipts.first_token_sources)}"
    )
    out.line(f"fallbacks: {_tally(receipts.fallbacks)}")


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


# -- a comparison


def render_compare(result: CompareResult, summary: CompareSummary) -> None:
    """Print a comparison; reasons why it is invalid come first."""
    out = Printer()
    for reason in summary.validity.invalid:
        out.line(f"INVALID: {reason}", style="bold red")
    for text in setup_lines(result):
        out.line(text)
    if summary.shown:
        caption = (
            "median over rounds [95 % interval]; times in ms; failures count as infinite; "
            f"ratios to {summary.baseline}, round by round"
        )
        out.table(*figure_rows(summary), caption=caption)
    if rows := sweep_rows(summary):
        title = f"highest rate with {ATTAINMENT:.0%} attainment, requests/s"
        caption = "probes as rate: attainment, in the order they were made"
        out.table(SWEEP_HEAD, rows, title=title, caption=caption)
    for text in variant_lines(summary):
        out.line(text)
    for caution in summary.validity.cautions:
        out.line(f"note: {caution}")


def setup_lines(result: CompareResult) -> list[str]:
    """Say what was sent, how it was scaled, and to what."""
    settings = result.settings
    text = (
        f"{result.trace['name']} at {settings['rate_per_s']:g} requests/s, {settings['rounds']} "
        f"rounds of {settings['requests']}, lengths times {settings['scale_lengths']}"
    )
    rounds = [m for m in result.measurements if m.kind == "round"]
    cuts = [m.workload for m in rounds or result.measurements]
    if cuts:
        mean_in = sum(cut["mean_input"] for cut in cuts) / len(cuts)
        mean_out = sum(cut["mean_output"] for cut in cuts) / len(cuts)
        text += (
            f": {mean_in:.0f} input and {mean_out:.0f} output tokens on average (the trace: "
            f"{cuts[0]['mean_input_before']:.0f} and {cuts[0]['mean_output_before']:.0f})"
        )
    if rounds:
        speedups = [m.speedup for m in rounds]
        text += f", arrivals times {min(speedups):.2g} to {max(speedups):.2g}"
    lines = [text, *(f"{variant.name}: {_variant_text(variant)}" for variant in result.variants)]
    if result.slo_s:
        limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in result.slo_s.items())
        lines.append(f"limits: {limits}; a failed request misses them")
    return lines


def _variant_text(variant: VariantFacts) -> str:
    if variant.settings is None:
        return f"{variant.model} behind an endpoint over {variant.api}, settings unknown"
    s = variant.settings
    workers = ", ".join(f"{count} {role}" for role, count in s.workers.items())
    gpus = f"{s.gpus} GPU{'s' * (s.gpus > 1)} and " if s.gpus else ""
    chosen = ("engine", "dtype", "block_size", "max_num_batched_tokens", "cudagraph_mode")
    facts = [f"{name} {'/'.join(s.of_workers[name])}" for name in chosen if name in s.of_workers]
    return (
        f"{workers} on {gpus}{s.cores} cores over {variant.api}, {variant.model}, "
        f"{', '.join(facts)}, KV cache {s.kv_cache_tokens:,} tokens"
    )


def figure_rows(summary: CompareSummary) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of figures."""
    head = [""]
    for variant in summary.variants:
        is_baseline = variant.name == summary.baseline
        head += [variant.name] if is_baseline else [variant.name, f"/ {summary.baseline}"]
    rows = []
    for figure in summary.shown:
        row = [f"{figure.label}, ms" if figure.unit == "s" else figure.label]
        for variant in summary.variants:
            row.append(_estimate_text(variant.figures.get(figure.key), figure))
            if variant.name != summary.baseline:
                row.append(_estimate_text(variant.ratios.get(figure.key), None))
        rows.append(row)
    return head, rows


def _estimate_text(found: Estimate | None, figure: Figure | None) -> str:
    """Write `12.3 [11.9, 14.0]`; without a figure it is a ratio."""
    if found is None:
        return "-"

    def text(value: float) -> str:
        if math.isinf(value):
            return "inf"
        if figure is None:
            return f"{value:.2f}"
        if figure.unit == "share":
            return f"{value:.0%}"
        shown = value * 1000 if figure.unit == "s" else value
        return f"{shown:.2f}" if shown < 10 else f"{shown:.1f}" if shown < 1000 else f"{shown:,.0f}"

    if found.low is None or found.high is None:
        return text(found.value)
    return f"{text(found.value)} [{text(found.low)}, {text(found.high)}]"


def sweep_rows(summary: CompareSummary) -> list[list[str]]:
    rows = []
    for variant in summary.variants:
        sweep = variant.sweep
        if sweep is not None:
            probes = ", ".join(f"{x.rate_per_s:.2f}: {x.attainment:.0%}" for x in sweep.probes)
            each = "-" if sweep.per_device is None else f"{sweep.per_device:.2f} per {sweep.device}"
            ratio = "-" if sweep.ratio is None else f"{sweep.ratio:.2f}"
            rows.append([variant.name, _capacity_text(sweep), each, ratio, probes])
    return rows


def _capacity_text(sweep: SweepSummary) -> str:
    """Say what was bracketed, and no more."""
    passed, failed = sweep.passed, sweep.failed
    if passed is None:
        return f"under {failed:.2f}"
    return f"{passed:.2f} (fails at {failed:.2f})" if failed else f"over {passed:.2f}"


def variant_lines(summary: CompareSummary) -> list[str]:
    """Report failures, transfers, fallbacks, and why there is no ITL."""
    lines = []
    for variant in summary.variants:
        if variant.requests:
            lines.append(f"{variant.name}: {_requests_text(variant)}")
        lines += [f"{variant.name}: {count} x {error}" for error, count in variant.errors.items()]
        if variant.itl_omitted:
            lines.append(f"no ITL: {variant.name}: {variant.itl_omitted}")
    return lines


def _requests_text(variant: VariantSummary) -> str:
    text = f"{variant.ok} of {variant.requests} requests ok"
    if variant.failed or variant.timed_out:
        text += f", {variant.failed} failed, {variant.timed_out} timed out"
    if variant.transferred:
        text += f"; KV moved for {variant.transferred}, {variant.transfer_bytes / 2**20:.1f} MiB"
    if variant.fallbacks:
        text += f"; fallbacks: {_tally(variant.fallbacks)}"
    if variant.one_token_chunks is not None:
        text += f"; {variant.one_token_chunks:.1%} of chunks held one token"
    if variant.router_s_per_million_tokens is not None:
        cost = variant.router_s_per_million_tokens
        text += f"; router {cost:.0f} CPU seconds per million tokens"
    return text
