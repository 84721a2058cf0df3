"""Results as tables on the terminal, and the texts that report.html shares with them."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.compare.run import ATTAINMENT
from benchmarks.runner import print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.compare.result import CompareResult, VariantFacts, VariantSettings
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


def stdout_console() -> Console:
    """Without a terminal rich assumes 80 columns and folds tables."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


# -- one replay


def render_replay(result: ReplayResult, console: Console) -> None:
    """Print the figures of one replay."""
    summary = result.summary()
    target = result.target
    line(console, f"{result.trace['name']} on {target['name']} at {target['address']}")
    rows = []
    for name, label in _LABELS.items():
        adjusted = summary.adjusted[name]
        last = "-" if adjusted is None else ms(adjusted.p99)
        rows.append([label, *_cells(summary.latency[name]), last])
    rows.append(["ICL (between chunks)", *_cells(summary.icl), ""])
    if summary.itl is not None:
        rows.append(["ITL", *_cells(summary.itl), ""])
    rows.append(["client lag", *_cells(summary.lag), ""])
    caption = "milliseconds; adj p99 counts failures as infinite"
    print_table(console, ["", *_PERCENTILES, "adj p99"], rows, caption=caption)
    for text in _replay_lines(summary):
        line(console, text)
    if summary.receipts is not None:
        _render_receipts(summary.receipts, console)
    for error, count in list(summary.errors.items())[:_SHOWN_ERRORS]:
        line(console, f"{count} x {error}")
    if len(summary.errors) > _SHOWN_ERRORS:
        line(console, f"and {len(summary.errors) - _SHOWN_ERRORS} other errors")
    if summary.degraded:
        line(console, f"DEGRADED: {summary.degraded}")


def _cells(found: Distribution | None) -> list[str]:
    if found is None:
        return ["-"] * len(_PERCENTILES)
    return [ms(getattr(found, name)) for name in _PERCENTILES]


def ms(seconds: float) -> str:
    if math.isinf(seconds):
        return "inf"
    return f"{seconds * 1000:.2f}" if seconds < 0.01 else f"{seconds * 1000:.1f}"


def _replay_lines(summary: Summary) -> list[str]:
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
        limits = ", ".join(f"{k} <= {ms(limit)} ms" for k, limit in summary.slo.limits_s.items())
        lines.append(
            f"SLO {limits}: attained by {summary.slo.attainment:.1%} of all requests, goodput "
            f"{summary.slo.goodput_per_s:.2f}/s"
        )
    return lines


def _render_receipts(receipts: ReceiptSummary, console: Console) -> None:
    rows = [
        [name.removesuffix("_s").replace("_", " "), *_cells(found)]
        for name, found in receipts.phases.items()
    ]
    caption = "milliseconds, as the server reports them"
    print_table(console, ["phase", *_PERCENTILES], rows, caption=caption)
    totals = receipts.totals
    line(
        console,
        f"transfers: {receipts.transferred} of {receipts.receipts} requests, "
        f"{totals['transfer_bytes'] / 2**20:.1f} MiB in {totals['transfer_blocks']} blocks; "
        f"{totals['cached_tokens']} prompt tokens were cached",
    )
    line(
        console,
        f"prefill on {_tally(receipts.prefill_workers)}; decode on "
        f"{_tally(receipts.decode_workers)}; first token from "
        f"{_tally(receipts.first_token_sources)}",
    )
    line(console, f"fallbacks: {_tally(receipts.fallbacks)}")


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


# -- a comparison


def render_compare(result: CompareResult, summary: CompareSummary, console: Console) -> None:
    """Print a comparison; reasons why it is invalid come first."""
    for reason in summary.validity.invalid:
        console.print(f"INVALID: {reason}", style="bold red", markup=False, soft_wrap=True)
    for text in setup_lines(result):
        line(console, text)
    if summary.shown:
        head, rows = figure_rows(summary)
        caption = (
            "median over rounds [95 % interval]; times in ms; failures count as infinite; "
            f"ratios to {summary.baseline}, round by round"
        )
        print_table(console, head, rows, caption=caption)
    if any(variant.sweep for variant in summary.variants):
        print_table(
            console,
            SWEEP_HEAD,
            sweep_rows(summary),
            title=f"highest rate with {ATTAINMENT:.0%} attainment, requests/s",
            caption="probes as rate: attainment, in the order they were made",
        )
    for text in variant_lines(summary):
        line(console, text)
    for caution in summary.validity.cautions:
        line(console, f"note: {caution}")


def setup_lines(result: CompareResult) -> list[str]:
    """Say what was sent, how it was scaled, and to what."""
    lines = [_traffic_line(result)]
    lines += [f"{variant.name}: {_variant_text(variant)}" for variant in result.variants]
    if result.slo_s:
        limits = ", ".join(f"{name} {limit * 1000:g} ms" for name, limit in result.slo_s.items())
        lines.append(f"limits: {limits}; a failed request misses them")
    return lines


def _traffic_line(result: CompareResult) -> str:
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
    return text


def _variant_text(variant: VariantFacts) -> str:
    if variant.settings is None:
        return f"{variant.model} behind an endpoint over {variant.api}, settings unknown"
    s = variant.settings
    workers = ", ".join(f"{count} {role}" for role, count in s.workers.items())
    chosen = ("engine", "dtype", "block_size", "max_num_batched_tokens", "cudagraph_mode")
    facts = [f"{name} {'/'.join(s.of_workers[name])}" for name in chosen if name in s.of_workers]
    return (
        f"{workers} on {_machine_text(s)} over {variant.api}, {variant.model}, "
        f"{', '.join(facts)}, KV cache {s.kv_cache_tokens:,} tokens"
    )


def _machine_text(settings: VariantSettings) -> str:
    gpus = f"{settings.gpus} GPU{'s' * (settings.gpus > 1)} and " if settings.gpus else ""
    return f"{gpus}{settings.cores} cores"


def figure_rows(summary: CompareSummary) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of figures."""
    head, rows = [""], []
    for variant in summary.variants:
        head.append(variant.name)
        if variant.name != summary.baseline:
            head.append(f"/ {summary.baseline}")
    for figure in summary.shown:
        row = [f"{figure.label}, ms" if figure.unit == "s" else figure.label]
        for variant in summary.variants:
            row.append(_estimate_text(variant.figures.get(figure.key), _writer(figure)))
            if variant.name != summary.baseline:
                found = variant.ratios.get(figure.key)
                row.append(_estimate_text(found, lambda x: f"{x:.2f}"))
        rows.append(row)
    return head, rows


def _estimate_text(found: Estimate | None, text: Callable[[float], str]) -> str:
    """Write `12.3 [11.9, 14.0]`."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return text(found.value)
    return f"{text(found.value)} [{text(found.low)}, {text(found.high)}]"


def _writer(figure: Figure) -> Callable[[float], str]:
    def text(value: float) -> str:
        if math.isinf(value):
            return "inf"
        if figure.unit == "share":
            return f"{value:.0%}"
        shown = value * 1000 if figure.unit == "s" else value
        return f"{shown:.2f}" if shown < 10 else f"{shown:.1f}" if shown < 1000 else f"{shown:,.0f}"

    return text


SWEEP_HEAD = ["", "rate", "each", "ratio", "probes"]


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
        return f"under {failed:.2f}" if failed is not None else "-"
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
