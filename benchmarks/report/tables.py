"""Results as tables on the terminal, and the texts that report.html shows too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from benchmarks.compare.summary import ATTAINMENT, LESS_IS_BETTER
from pdserve.cli.console import open_console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult, VariantFacts
    from benchmarks.compare.summary import CompareSummary, VariantSummary
    from benchmarks.replay import ReplayResult
    from benchmarks.stats import Distribution, Estimate

_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "tt2t": "TT2T (token 1 to 2)", "e2e": "E2E"}
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
_SHOWN_ERRORS = 5
SWEEP_HEAD = ["", "rate", "each", "ratio", "cost per million tokens", "probes"]


def print_line(text: str, style: str = "") -> None:
    open_console().print(text, style=style or None, markup=False, soft_wrap=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str | None = None
) -> None:
    """Print a table. The first column is left-aligned, the others are right-aligned."""
    table = Table(caption=caption, caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        # Not as strings, because rich parses brackets in strings as markup.
        table.add_row(*(Text(x if isinstance(x, str) else number_text(x)) for x in row))
    open_console().print(table)


def number_text(value: Any) -> str:
    """Return the text of a number with three significant digits."""
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
    s, target = result.summary(), result.target
    print_line(f"{result.trace['name']} on {target['name']} at {target['address']}")
    found = {label: s.latency[name] for name, label in _LABELS.items()}
    found |= {"ITL": s.itl, "client lag": s.lag}
    caption = "milliseconds; failed requests count as infinitely slow"
    print_table(["", *_PERCENTILES], _latency_rows(found), caption=caption)
    print_line(
        f"requests: {s.requests}, ok {s.ok}, failed {s.failed}, timed out {s.timed_out}\n"
        f"rates: offered {s.offered_per_s:.2f}/s, completed {s.completed_per_s:.2f}/s over "
        f"{s.window_s:.1f} s; input {s.input_tokens_per_s:.0f} tokens/s, output "
        f"{s.output_tokens_per_s:.0f} tokens/s"
    )
    if s.itl_caution:
        print_line(f"ITL is between chunks: {s.itl_caution}")
    if s.slo is not None:
        limits = ", ".join(f"{k} <= {limit * 1000:g} ms" for k, limit in s.slo.limits_s.items())
        print_line(
            f"SLO {limits}: attained by {s.slo.attainment:.1%} of all requests, goodput "
            f"{s.slo.goodput_per_s:.2f}/s"
        )
    if s.receipts is not None:
        totals, counts = s.receipts.totals, s.receipts.counts
        caption = "milliseconds, as the server reports them"
        phases = {name.removesuffix("_s"): x for name, x in s.receipts.phases.items()}
        print_table(["phase", *_PERCENTILES], _latency_rows(phases), caption=caption)
        print_line(
            f"transfers: {s.receipts.transferred} of {s.receipts.receipts} requests, "
            f"{totals['transfer_bytes'] / 2**20:.1f} MiB in {totals['transfer_blocks']} blocks; "
            f"{totals['cached_tokens']} prompt tokens were cached"
        )
        for name, tally in counts.items():
            print_line(f"{name.replace('_', ' ')}: {_tally(tally)}")
    if s.sessions is not None:
        found = {f"TTFT, turn {turns}": x for turns, x in s.sessions.ttft.items()}
        found |= {"session": s.sessions.time, "session without pauses": s.sessions.waited}
        caption = "milliseconds; a session with a failed turn counts as infinitely long"
        print_table(["sessions", *_PERCENTILES], _latency_rows(found), caption=caption)
        text = f"sessions: {s.sessions.sessions} with {s.sessions.turns} turns"
        if s.sessions.hit_rate is not None:
            text += (
                f"; {s.sessions.hit_rate:.1%} of prompt tokens were cached, "
                f"{s.sessions.recomputed_tokens:,} of earlier turns computed again"
            )
        print_line(text)
    for error, count in list(s.errors.items())[:_SHOWN_ERRORS]:
        print_line(f"{count} x {error}")
    if s.degraded:
        print_line(f"DEGRADED: {s.degraded}")


def _latency_rows(found: Mapping[str, Distribution | None]) -> list[list[object]]:
    return [
        [label, *(None if x is None else getattr(x, name) * 1000 for name in _PERCENTILES)]
        for label, x in found.items()
    ]


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


# -- a comparison


def render_compare(result: CompareResult, summary: CompareSummary) -> None:
    """Print a comparison. Reasons why it is invalid are first."""
    for reason in summary.validity.invalid:
        print_line(f"INVALID: {reason}", style="bold red")
    for text in setup_lines(result):
        print_line(text)
    if summary.shown:
        caption = (
            "median over rounds [95 % interval]; times in ms; failures count as infinite; "
            f"ratios to {summary.baseline}, round by round"
        )
        head, rows = figure_rows(summary)
        print_table(head, [[text for text, _ in row] for row in rows], caption=caption)
    if sweep := sweep_rows(summary):
        print_line(f"highest rate with {ATTAINMENT:.0%} attainment, requests/s")
        print_table(SWEEP_HEAD, sweep, caption="probes as rate: attainment, in their order")
    for text in variant_lines(summary):
        print_line(text)
    for caution in summary.validity.cautions:
        print_line(f"note: {caution}")


def setup_lines(result: CompareResult) -> list[str]:
    """Return lines that describe the traffic, its scaling and the variants."""
    settings = result.settings
    text = (
        f"{result.trace['name']} at {settings['rate_per_s']:g} requests/s, {settings['rounds']} "
        f"rounds of {settings['requests']}, lengths times {settings['scale_lengths']}"
    )
    if result.measurements:
        first = result.measurements[0]
        text += (
            f" (in the first round {first.workload['mean_input']:.0f} input and "
            f"{first.workload['mean_output']:.0f} output tokens on average, in the trace "
            f"{first.workload['mean_input_before']:.0f} and "
            f"{first.workload['mean_output_before']:.0f}), arrivals times {first.speedup:.2g}"
        )
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


def figure_rows(summary: CompareSummary) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return head and rows of the table of figures. A cell is (text, CSS class). The class of a
    ratio whose interval excludes 1 is `better` or `worse`."""
    head = [""]
    for variant in summary.variants:
        head += [variant.name] + [f"/ {summary.baseline}"] * (variant.name != summary.baseline)
    rows = []
    for key, (label, unit) in summary.shown.items():
        row = [(f"{label}, ms" if unit == "s" else label, "")]
        for variant in summary.variants:
            row.append((_estimate_text(variant.figures.get(key), unit), ""))
            if variant.name != summary.baseline:
                ratio, kind = variant.ratios.get(key), ""
                if ratio is not None and not (ratio.low or 0) <= 1 <= (ratio.high or 1):
                    kind = "better" if (ratio.value < 1) == (unit in LESS_IS_BETTER) else "worse"
                row.append((_estimate_text(ratio, "ratio"), kind))
        rows.append(row)
    return head, rows


def _estimate_text(found: Estimate | None, unit: str) -> str:
    """Return an estimate as text, such as `12.3 [11.9, 14.0]`."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return _value_text(found.value, unit)
    low, high = (_value_text(x, unit) for x in (found.low, found.high))
    return f"{_value_text(found.value, unit)} [{low}, {high}]"


def _value_text(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.0%}"
    value = value * 1000 if unit == "s" else value
    if unit == "ratio" or value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def sweep_rows(summary: CompareSummary) -> list[list[str]]:
    rows = []
    for variant in summary.variants:
        sweep = variant.sweep
        if sweep is not None:
            probes = ", ".join(f"{x.rate_per_s:.2f}: {x.attainment:.0%}" for x in sweep.probes)
            each = "-" if sweep.per_device is None else f"{sweep.per_device:.2f} per {sweep.device}"
            ratio = "-" if sweep.ratio is None else f"{sweep.ratio:.2f}"
            # Show only the known bounds of the rate.
            if sweep.passed is None:
                rate = f"under {sweep.failed:.2f}"
            elif sweep.failed is None:
                rate = f"over {sweep.passed:.2f}"
            else:
                rate = f"{sweep.passed:.2f} (fails at {sweep.failed:.2f})"
            cost = "-" if sweep.cost is None else _value_text(sweep.cost, "price")
            rows.append([variant.name, rate, each, ratio, cost, probes])
    return rows


def variant_lines(summary: CompareSummary) -> list[str]:
    """Return lines with failures, transfers and fallbacks of each variant, and cautions on ITL."""
    lines = []
    for variant in summary.variants:
        if variant.requests:
            lines.append(f"{variant.name}: {_requests_text(variant)}")
        lines += [f"{variant.name}: {count} x {error}" for error, count in variant.errors.items()]
        if variant.itl_caution:
            lines.append(f"{variant.name}: ITL is between chunks: {variant.itl_caution}")
    return lines


def _requests_text(variant: VariantSummary) -> str:
    text = f"{variant.ok} of {variant.requests} requests ok"
    if variant.failed or variant.timed_out:
        text += f", {variant.failed} failed, {variant.timed_out} timed out"
    if variant.transferred:
        text += f"; KV moved for {variant.transferred}, {variant.transfer_bytes / 2**20:.1f} MiB"
    if variant.fallbacks:
        text += f"; fallbacks: {_tally(variant.fallbacks)}"
    if variant.router_s_per_million_tokens is not None:
        cost = variant.router_s_per_million_tokens
        text += f"; router {cost:.0f} CPU seconds per million tokens"
    return text
