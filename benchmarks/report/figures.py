"""The figures of report.html."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchmarks.compare.summary import ATTAINMENT
from benchmarks.metrics import receipt_number, summarise, timed_gaps, values_of
from benchmarks.report.charts import WIDTH, Bars, Chart, ChartInterval, bars, chart, steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult, Measurement
    from benchmarks.metrics import RequestTimeline

COLOURS: Final = 6
_CURVE_POINTS: Final = 200
_SINCE: Final = "s since the round began"
_PHASES: Final = {
    "queue": "queue_s",
    "prefill": "prefill_s",
    "transfer": "exposed_transfer_s",
    "decode": "decode_s",
}
_PHASE_KEY: Final = [
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("transfer", "transfer, exposed"),
    ("decode", "decode"),
    ("other", "router and network"),
]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its legend of (CSS class, name). Without a picture, `about` has the reason."""

    title: str
    about: str
    picture: Chart | Bars | None = None
    key: Sequence[tuple[str, str]] = ()

    @property
    def is_wide(self) -> bool:
        return self.picture is not None and self.picture.width > WIDTH


def sections(result: CompareResult) -> dict[str, list[Figure]]:
    """Return the figures of each section of the report."""
    kinds = {variant.name: f"arm{i % COLOURS}" for i, variant in enumerate(result.variants)}
    good = {name: _good(result.shown(name)) for name in kinds}
    limit_ms = {name: limit_s * 1000 for name, limit_s in result.slo_s.items()}
    gaps_s = {name: [gap for _, gap in timed_gaps(x)] for name, x in good.items()}

    def latency(name: str, label: str, about: str) -> Figure:
        samples = {variant: values_of(records, name) for variant, records in good.items()}
        return _cdf(kinds, label, about, samples, limit_ms.get(name))

    return {
        "Latency": [
            latency("ttft", "TTFT", "time to first token, from sending"),
            latency("tpot", "TPOT", "mean time per token after the first, by request"),
            _cdf(kinds, "ITL", "gaps between chunks, pooled over requests", gaps_s),
            latency("e2e", "E2E", "from sending to the last token"),
        ],
        "Under load, and where the time went": [_attainment(kinds, result), _phases(good)],
        "On the workers": _on_workers(result),
    }


def _key(kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(kind, name) for name, kind in kinds.items()]


def _cdf(
    kinds: Mapping[str, str],
    label: str,
    about: str,
    samples_s: Mapping[str, Sequence[float]],
    limit_ms: float | None = None,
) -> Figure:
    title = f"{label}, cumulative"
    every_ms = [value * 1000 for sample in samples_s.values() for value in sample]
    if not every_ms:
        return Figure(title, "no request has one")
    lines = []
    for variant, unsorted in samples_s.items():
        sample, last = sorted(unsorted), len(unsorted) - 1
        stride = max(1, len(sample) // _CURVE_POINTS)
        kept = sorted({*range(0, len(sample), stride), last}) if sample else []
        points = [(sample[i] * 1000, (i + 1) / len(sample)) for i in kept]
        lines.append((kinds[variant], steps(points)))
    is_log = max(every_ms) > 20 * max(min(every_ms), 1e-3)
    picture = chart(f"{label}, ms", "share of requests", lines, is_log=is_log)
    picture.limit(limit_ms, "limit", on_x=True)
    return Figure(title, about, picture, _key(kinds))


def _attainment(kinds: Mapping[str, str], result: CompareResult) -> Figure:
    """Return the figure of mean SLO attainment at each rate, over rounds and probes."""
    title = "SLO attainment against rate"
    if not result.slo_s:
        return Figure(title, "no limits were set: give --slo-ttft and --slo-tpot")
    by_rate: dict[str, dict[float, list[float]]] = {name: {} for name in kinds}
    for m in result.measurements:
        slo = summarise(m.records, result.slo_s).slo
        if slo is not None:
            by_rate[m.variant].setdefault(m.rate_per_s, []).append(slo.attainment)
    lines, dots = [], []
    for name, found in by_rate.items():
        points = [(rate, fmean(values)) for rate, values in sorted(found.items())]
        lines.append((kinds[name], points))
        dots.append((kinds[name], [(x, y, f"{name}: {x:.2f}/s, {y:.0%}") for x, y in points]))
    picture = chart("offered, requests/s", "share within the limits", lines, dots, y_end=1.0)
    picture.limit(ATTAINMENT, f"{ATTAINMENT:.0%}")
    has_probes = any(m.kind == "probe" for m in result.measurements)
    about = "rounds and probes" if has_probes else "the rate of the rounds; --sweep adds more"
    return Figure(title, about, picture, _key(kinds))


def _phases(good: Mapping[str, Sequence[RequestTimeline]]) -> Figure:
    """Return the figure of mean times by phase, from the servers' receipts."""
    title = "Mean time of each phase"
    found = {}
    for name, records in good.items():
        reported = [r for r in records if r.receipt is not None]
        if not reported:
            continue
        pieces = {
            kind: fmean(receipt_number(r.receipt, field) for r in reported) * 1000
            for kind, field in _PHASES.items()
        }
        pieces["other"] = max(0.0, fmean(values_of(reported, "e2e")) * 1000 - sum(pieces.values()))
        ends = pairwise(accumulate(pieces.values(), initial=0.0))
        found[name] = [
            ChartInterval(start, end, kind, f"{kind}: {ms:.1f} ms a request")
            for (kind, ms), (start, end) in zip(pieces.items(), ends, strict=True)
        ]
    if not found:
        return Figure(title, "no answer carried a receipt")
    about = (
        "means per request, from the servers' receipts; only the part of a transfer that delayed "
        "decode is shown; the rest of E2E is router and network"
    )
    longest = max(spans[-1].end for spans in found.values())
    picture = bars("ms a request", {name: [spans] for name, spans in found.items()}, longest)
    return Figure(title, about, picture, _PHASE_KEY)


def _on_workers(result: CompareResult) -> list[Figure]:
    """Return a figure for each variant, with the requests of its first round by worker."""
    firsts = {variant.name: result.shown(variant.name)[:1] for variant in result.variants}
    # Use the same scale for all variants, so that bars can be compared.
    end_s = max((r.chunk_s[-1] for first in firsts.values() for r in _good(first)), default=0.0)
    figures = []
    for name, first in firsts.items():
        title = f"Requests on workers, {name}"
        rows: dict[str, list[list[ChartInterval]]] = {}
        for record in _good(first):
            for worker, spans in _spans(record).items():
                rows.setdefault(worker, []).append(spans)
        if not rows:
            figures.append(Figure(title, "no request was answered"))
            continue
        rows = dict(sorted(rows.items(), key=lambda x: (not x[0].startswith("prefill"), x[0])))
        of = f"{first[0].kind} {first[0].number + 1}, {first[0].rate_per_s:.3g} requests/s"
        picture = bars(_SINCE, rows, end_s, is_wide=True)
        figures.append(Figure(title, f"{of}; one bar a request", picture, _PHASE_KEY[:4]))
    return figures


def _good(measurements: Sequence[Measurement]) -> list[RequestTimeline]:
    return [r for m in measurements for r in m.records if r.status == "ok"]


def _spans(record: RequestTimeline) -> dict[str, list[ChartInterval]]:
    """Return the spans of a request by worker. Times are from the client, durations from the
    receipt."""
    receipt = record.receipt or {}
    sent_s, first_s, last_s = record.sent_s or 0.0, record.chunk_s[0], record.chunk_s[-1]
    hint = f"{record.input_tokens} prompt tokens, {record.output_tokens} out"
    prefill_s = receipt_number(receipt, "prefill_s") if receipt else first_s - sent_s
    begun_s = max(sent_s, first_s - prefill_s)
    moved_s = min(last_s, first_s + receipt_number(receipt, "exposed_transfer_s"))
    prefill = str(receipt.get("prefill_worker") or "endpoint")
    decode = str(receipt.get("decode_worker") or prefill)
    found = {
        prefill: [
            ChartInterval(sent_s, begun_s, "queue", f"queue: {hint}"),
            ChartInterval(begun_s, first_s, "prefill", f"prefill: {hint}"),
        ]
    }
    found.setdefault(decode, []).extend(
        [
            ChartInterval(first_s, moved_s, "transfer", f"transfer, exposed: {hint}"),
            ChartInterval(moved_s, last_s, "decode", f"decode: {hint}"),
        ]
    )
    return found
