"""The pictures of report.html."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchmarks.compare.sweep import ATTAINMENT
from benchmarks.metrics import PER_REQUEST, receipt_number, summarise, timed_gaps, values_of
from benchmarks.report.charts import WIDTH, Axis, Bars, Chart, Span
from benchmarks.stats import percentiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.records import RequestRecord
    from benchmarks.report.charts import Point

COLOURS: Final = 6
_CURVE_POINTS: Final = 200
_BINS: Final = 40
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
    """A picture with its key of (CSS class, name), or without one the reason in `about`."""

    title: str
    about: str
    picture: Chart | Bars | None = None
    key: Sequence[tuple[str, str]] = ()

    @property
    def is_wide(self) -> bool:
        return self.picture is not None and self.picture.width > WIDTH


class Figures:
    """Draws a comparison. `has_itl` says that gaps between chunks are gaps between tokens."""

    def __init__(self, result: CompareResult, *, has_itl: bool) -> None:
        self._result = result
        self._slo_s = result.slo_s
        self._has_itl = has_itl
        names = [variant.name for variant in result.variants]
        self._kinds = {name: f"arm{i % COLOURS}" for i, name in enumerate(names)}
        self._key = [(kind, name) for name, kind in self._kinds.items()]
        self._good = {
            name: [r for m in result.shown(name) for r in m.records if r.status == "ok"]
            for name in names
        }

    def sections(self) -> dict[str, list[Figure]]:
        """Return the figures of each section of the report."""
        gap = "ITL" if self._has_itl else "Gaps between chunks (ICL)"
        pooled = "pooled over requests" if self._has_itl else "some chunks hold several tokens"
        return {
            "Latency": [
                self._cdf("ttft", "TTFT", "time to first token, from sending"),
                self._cdf("tpot", "TPOT", "mean time per token after the first, by request"),
                self._cdf("gap", gap, pooled),
                self._cdf("e2e", "E2E", "from sending to the last token"),
            ],
            "Over time": [self._ttft_over_time(), self._gaps_over_time()],
            "Under load": [
                self._against_rate("Goodput", "requests/s within the limits"),
                self._against_rate(
                    "SLO attainment", "share of requests within the limits", is_share=True
                ),
            ],
            "Where the time went": [self._phases(), self._kv_moved()],
            "On the workers": self._on_workers(),
        }

    def _cdf(self, name: str, label: str, about: str) -> Figure:
        title = f"{label}, cumulative"
        samples = {
            variant: sorted(
                1000 * x
                for x in (
                    [gap for _, gap in timed_gaps(records)]
                    if name == "gap"
                    else values_of(records, name)
                )
            )
            for variant, records in self._good.items()
        }
        every = [value for sample in samples.values() for value in sample]
        if not every:
            return Figure(title, "no request has one")
        is_log = max(every) > 20 * max(min(every), 1e-3)
        x, y = Axis(f"{label}, ms", every, is_log), Axis("share of requests", (0.0, 1.0))
        chart = Chart(x, y, title=title)
        chart.limit(self._limit_ms(name), "limit", on_x=True)
        for variant, sample in samples.items():
            stride = max(1, len(sample) // _CURVE_POINTS)
            kept = sorted({*range(0, len(sample), stride), len(sample) - 1}) if sample else []
            points = [(sample[i], (i + 1) / len(sample)) for i in kept]
            chart.steps(points, self._kinds[variant])
        return Figure(title, about, chart, self._key)

    def _limit_ms(self, name: str) -> float | None:
        return self._slo_s[name] * 1000 if name in self._slo_s else None

    def _ttft_over_time(self) -> Figure:
        title = "TTFT over time"
        found = {
            name: [(r, (PER_REQUEST["ttft"](r) or 0.0) * 1000) for r in records if r.chunk_s]
            for name, records in self._good.items()
        }
        every = [x for sample in found.values() for x in sample]
        if not every:
            return Figure(title, "no request was answered")
        x = Axis("s since the round began", [r.scheduled_s for r, _ in every])
        chart = Chart(x, Axis("TTFT, ms", [ms for _, ms in every]), title=title)
        chart.limit(self._limit_ms("ttft"), "limit")
        for name, sample in found.items():
            hints = [f"{name}: {ms:.1f} ms, {r.input_tokens} prompt tokens" for r, ms in sample]
            chart.dots([(r.scheduled_s, ms) for r, ms in sample], self._kinds[name], hints)
        return Figure(title, "all rounds overlaid; one dot a request", chart, self._key)

    def _gaps_over_time(self) -> Figure:
        title = "ITL over time" if self._has_itl else "Gaps between chunks over time"
        gaps = {name: timed_gaps(records) for name, records in self._good.items()}
        every = [gap for sample in gaps.values() for gap in sample]
        if not every:
            return Figure(title, "no answer had two chunks")
        width_s = max(at_s for at_s, _ in every) / _BINS
        curves: dict[str, list[tuple[float, list[float]]]] = {}
        for name, sample in gaps.items():
            bins: dict[int, list[float]] = {}
            for at_s, value in sample:
                bins.setdefault(min(_BINS - 1, int(at_s / width_s)), []).append(value * 1000)
            curves[name] = [
                ((n + 0.5) * width_s, percentiles(x, (50, 99))) for n, x in sorted(bins.items())
            ]
        shown = [value for curve in curves.values() for _, both in curve for value in both]
        x = Axis("s since the round began", (0.0, width_s * _BINS))
        chart = Chart(x, Axis("ms", shown, is_log=True), title=title)
        for name, curve in curves.items():
            for place, thin in enumerate(("", " thin")):
                points = [(at_s, both[place]) for at_s, both in curve]
                chart.line(points, self._kinds[name] + thin)
        about = f"median (thick) and p99 (thin) in each {width_s:.2g} s, all rounds together"
        return Figure(title, about, chart, self._key)

    def _against_rate(self, what: str, label: str, *, is_share: bool = False) -> Figure:
        title = f"{what} against rate"
        if not self._slo_s:
            return Figure(title, "no limits were set: give --slo-ttft and --slo-tpot")
        found = {name: self._by_rate(name, is_share=is_share) for name in self._kinds}
        every = [point for points in found.values() for point in points]
        if not every:
            return Figure(title, "nothing was measured")
        y = Axis(label, [0.0, 1.0] if is_share else [y for _, y in every])
        chart = Chart(Axis("offered, requests/s", [x for x, _ in every]), y, title=title)
        if is_share:
            chart.limit(ATTAINMENT, f"{ATTAINMENT:.0%}")
        else:
            end = min(chart.x.high, chart.y.high)
            chart.line([(0.0, 0.0), (end, end)], "ideal")
        for name, points in found.items():
            chart.line(points, self._kinds[name])
            hints = [f"{name}: {x:.2f}/s, {y:.2f}" for x, y in points]
            chart.dots(points, self._kinds[name], hints)
        has_probes = any(m.kind == "probe" for m in self._result.measurements)
        only = "only the rate of the rounds; --sweep adds more"
        about = "rounds and probes" if has_probes else only
        return Figure(title, about, chart, self._key)

    def _by_rate(self, name: str, *, is_share: bool) -> list[Point]:
        by_rate: dict[float, list[float]] = {}
        for m in (*self._result.of(name, "round"), *self._result.of(name, "probe")):
            slo = summarise(m.records, self._slo_s).slo
            if slo is not None:
                value = slo.attainment if is_share else slo.goodput_per_s
                by_rate.setdefault(m.rate_per_s, []).append(value)
        return [(rate, fmean(values)) for rate, values in sorted(by_rate.items())]

    def _phases(self) -> Figure:
        """Means by phase, as the servers' receipts have them."""
        title = "Where the time went"
        bars = {}
        for name, records in self._good.items():
            told = [r for r in records if r.receipt is not None]
            if told:
                pieces = {
                    kind: fmean(receipt_number(r.receipt, field) for r in told) * 1000
                    for kind, field in _PHASES.items()
                }
                whole = fmean(PER_REQUEST["e2e"](r) or 0.0 for r in told) * 1000
                pieces["other"] = max(0.0, whole - sum(pieces.values()))
                spans: list[Span] = []
                for kind, value in pieces.items():
                    start = spans[-1].end if spans else 0.0
                    hint = f"{kind}: {value:.1f} ms a request"
                    spans.append(Span(start, start + value, kind, hint))
                bars[name] = [spans]
        if not bars:
            return Figure(title, "no answer carried a receipt")
        about = (
            "means by request, as the servers report them; a transfer counts only as far as decode "
            "waited for it; the rest of E2E is router and network"
        )
        end = max(spans[-1].end for (spans,) in bars.values())
        return Figure(title, about, Bars(title, "ms a request", bars, end), _PHASE_KEY)

    def _kv_moved(self) -> Figure:
        title = "KV moved"
        found: dict[str, list[tuple[Point, str]]] = {}
        for name, records in self._good.items():
            for record in records:
                mib = receipt_number(record.receipt, "transfer_bytes") / 2**20
                if mib:
                    took_ms = receipt_number(record.receipt, "transfer_s") * 1000
                    hint = f"{mib:.2f} MiB in {took_ms:.1f} ms"
                    found.setdefault(name, []).append(((record.input_tokens, mib), hint))
        every = [point for marks in found.values() for point, _ in marks]
        if not every:
            return Figure(title, "no KV moved between workers")
        x = Axis("prompt tokens", [x for x, _ in every])
        chart = Chart(x, Axis("MiB", [y for _, y in every]), title=title)
        for name, marks in found.items():
            chart.dots([p for p, _ in marks], self._kinds[name], [hint for _, hint in marks])
        totals = [f"{name}: {sum(p[1] for p, _ in marks):.1f} MiB" for name, marks in found.items()]
        about = f"one dot a request, of all rounds: {', '.join(totals)}"
        return Figure(title, about, chart, self._key)

    def _on_workers(self) -> list[Figure]:
        """The first round of each variant, request by request on its workers."""
        firsts = {name: self._result.shown(name)[:1] for name in self._kinds}
        records = {
            name: [r for m in first for r in m.records if r.status == "ok"]
            for name, first in firsts.items()
        }
        # One scale for all, so that bars can be compared by eye.
        end_s = max((r.chunk_s[-1] for found in records.values() for r in found), default=0.0)
        figures = []
        for name, first in firsts.items():
            title = f"Requests on workers, {name}"
            rows: dict[str, list[list[Span]]] = {}
            for record in records[name]:
                for worker, spans in _spans(record).items():
                    rows.setdefault(worker, []).append(spans)
            if not rows:
                figures.append(Figure(title, "no request was answered"))
                continue
            rows = dict(sorted(rows.items(), key=lambda x: (not x[0].startswith("prefill"), x[0])))
            unit = "s since the round began"
            bars = Bars(title, unit, rows, end_s, is_wide=True)
            of = f"{first[0].kind} {first[0].number + 1}, {first[0].rate_per_s:.3g} requests/s"
            about = f"{of}; one bar a request"
            figures.append(Figure(title, about, bars, _PHASE_KEY[:4]))
        return figures


def _spans(record: RequestRecord) -> dict[str, list[Span]]:
    """Split a request by worker: times at the client, lengths by the receipt."""
    sent_s, first_s, last_s = record.sent_s or 0.0, record.chunk_s[0], record.chunk_s[-1]
    hint = f"{record.input_tokens} prompt tokens, {record.output_tokens} out"
    if record.receipt is None:
        waited = Span(sent_s, first_s, "prefill", f"to first token: {hint}")
        return {"endpoint": [waited, Span(first_s, last_s, "decode", f"decode: {hint}")]}
    begun_s = max(sent_s, first_s - receipt_number(record.receipt, "prefill_s"))
    moved_s = min(last_s, first_s + receipt_number(record.receipt, "exposed_transfer_s"))
    prefill = str(record.receipt.get("prefill_worker") or "worker")
    decode = str(record.receipt.get("decode_worker") or prefill)
    found = {
        prefill: [
            Span(sent_s, begun_s, "queue", f"queue: {hint}"),
            Span(begun_s, first_s, "prefill", f"prefill: {hint}"),
        ]
    }
    found.setdefault(decode, []).extend(
        [
            Span(first_s, moved_s, "transfer", f"transfer, exposed: {hint}"),
            Span(moved_s, last_s, "decode", f"decode: {hint}"),
        ]
    )
    return found
