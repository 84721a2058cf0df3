"""Results and trace statistics as tables for people."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

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
