"""Results and trace statistics as tables for people."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.describe import Description
    from benchmarks.metrics import Summary
    from benchmarks.receipts import ReceiptSummary
    from benchmarks.result import ReplayResult
    from benchmarks.stats import Distribution

LABELS = {
    "ttft": "TTFT from sending",
    "ttft_sched": "TTFT from schedule",
    "tpot": "TPOT",
    "tt2t": "TT2T (token 1 to 2)",
    "e2e": "E2E from sending",
    "e2e_sched": "E2E from schedule",
}
_SHOWN_ERRORS = 5


def stdout_console() -> Console:
    """Where tables go. Without a terminal rich assumes 80 columns and folds them."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def render_result(result: ReplayResult, console: Console) -> None:
    """Print a run's figures; latencies are in milliseconds."""
    summary = result.summary()
    trace, target = result.trace, result.target
    _line(console, f"{trace['name']} on {target['name']} at {target['address']}")
    console.print(_latency_table(summary))
    for line in _lines(summary):
        _line(console, line)
    if summary.receipts is not None:
        console.print(_phase_table(summary.receipts))
        for line in _receipt_lines(summary.receipts):
            _line(console, line)
    for error, count in list(summary.errors.items())[:_SHOWN_ERRORS]:
        _line(console, f"{count} x {error}")
    if len(summary.errors) > _SHOWN_ERRORS:
        _line(
            console, f"and {len(summary.errors) - _SHOWN_ERRORS} other errors, in the result file"
        )
    if summary.degraded:
        _line(console, f"DEGRADED: {summary.degraded}")


def render_description(description: Description, console: Console) -> None:
    """Print a trace's statistics."""
    table = Table(title=description.name, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for label, value in _description_rows(description):
        table.add_row(label, value)
    console.print(table)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _latency_table(summary: Summary) -> Table:
    table = Table(
        caption="milliseconds; adj p99 counts failures as infinite", caption_justify="left"
    )
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99", "max", "adj p99"):
        table.add_column(name, justify="right")
    for name, label in LABELS.items():
        adjusted = summary.adjusted[name]
        _add_latency(
            table, label, summary.latency[name], "-" if adjusted is None else _ms(adjusted.p99)
        )
    _add_latency(table, "ICL (between chunks)", summary.icl, "")
    if summary.itl is not None:
        _add_latency(table, "ITL", summary.itl, "")
    _add_latency(table, "lag of the client", summary.lag, "")
    return table


def _add_latency(table: Table, label: str, found: Distribution | None, adjusted: str) -> None:
    if found is None:
        table.add_row(label, *["-"] * 6, adjusted)
        return
    values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    table.add_row(label, *map(_ms, values), adjusted)


def _ms(seconds: float) -> str:
    if math.isinf(seconds):
        return "inf"
    milliseconds = seconds * 1000
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _lines(summary: Summary) -> list[str]:
    lines = [
        (
            f"requests: {summary.requests}, ok {summary.ok}, failed {summary.failed}, "
            f"timed out {summary.timed_out}"
        ),
        (
            f"rates: offered {summary.offered_per_s:.2f}/s, completed "
            f"{summary.completed_per_s:.2f}/s over {summary.window_s:.1f} s; input "
            f"{summary.input_tokens_per_s:.0f} tokens/s, output "
            f"{summary.output_tokens_per_s:.0f} tokens/s"
        ),
    ]
    if summary.itl_omitted:
        lines.append(f"no ITL: {summary.itl_omitted}")
    if summary.slo is not None:
        limits = ", ".join(
            f"{name} <= {_ms(limit_s)} ms" for name, limit_s in summary.slo.limits_s.items()
        )
        lines.append(
            f"SLO {limits}: attained by {summary.slo.attainment:.1%} of all requests, goodput "
            f"{summary.slo.goodput_per_s:.2f}/s"
        )
    return lines


def _phase_table(receipts: ReceiptSummary) -> Table:
    table = Table(caption="milliseconds, as the server reports them", caption_justify="left")
    table.add_column("phase")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, found in receipts.phases.items():
        label = name.removesuffix("_s").replace("_", " ")
        values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
        table.add_row(label, *map(_ms, values))
    return table


def _receipt_lines(receipts: ReceiptSummary) -> list[str]:
    totals = receipts.totals
    return [
        (
            f"transfers: {receipts.transferred} of {receipts.receipts} requests, "
            f"{totals['transfer_bytes'] / 2**20:.1f} MiB in {totals['transfer_blocks']} blocks; "
            f"{totals['cached_tokens']} prompt tokens were cached"
        ),
        (
            f"prefilled on {_tally(receipts.prefill_workers)}; "
            f"decoded on {_tally(receipts.decode_workers)}; "
            f"first token from {_tally(receipts.first_token_sources)}"
        ),
        f"fallbacks: {_tally(receipts.fallbacks)}",
    ]


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def _description_rows(found: Description) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{found.requests:,}"),
        ("duration", f"{found.duration_s:,.1f} s"),
        ("requests per second", f"{found.requests_per_s:.2f}"),
        ("inter-arrival CV", f"{found.interarrival_cv:.2f}"),
        ("zero inter-arrivals", f"{found.zero_interarrivals:.1%}"),
    ]
    if found.tick_s is not None:
        rows.append(("arrivals are rounded to", f"{found.tick_s:g} s"))
    rows += [
        (f"peak/mean, Fano in {item.width_s} s", f"{item.peak_to_mean:.2f}, {item.fano:.2f}")
        for item in found.burstiness
    ]
    rows += _length_rows("input", found.input_tokens) + _length_rows("output", found.output_tokens)
    rows += [
        ("outputs of 1 token", str(found.single_token_outputs)),
        ("output tokens / input tokens", f"{found.output_to_input:.3f}"),
    ]
    if (reuse := found.reuse) is not None:
        rows += [
            ("prefix block", f"{reuse.block_size} tokens, {reuse.distinct_blocks:,} distinct"),
            ("shared prefix, of tokens", f"{reuse.token_hit:.1%}"),
            ("shared prefix, of blocks", f"{reuse.block_hit:.1%}"),
            ("requests with a shared prefix", f"{reuse.request_hit:.1%}"),
        ]
    rows += [(f"fit {limit:,} tokens", f"{share:.1%}") for limit, share in found.fits]
    return rows


def _length_rows(label: str, found: Distribution) -> list[tuple[str, str]]:
    return [
        (f"{label} tokens, mean", f"{found.mean:,.1f}"),
        (f"{label} p50 / p90 / p99", f"{found.p50:,.0f} / {found.p90:,.0f} / {found.p99:,.0f}"),
        (f"{label} min / max", f"{found.min:,.0f} / {found.max:,.0f}"),
    ]
