"""The pictures of report.html."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchmarks.compare.summary import ATTAINMENT
from benchmarks.metrics import PER_REQUEST, receipt_number, summarise, timed_gaps, values_of
from benchmarks.report.charts import WIDTH, Bars, Chart, Span, bars, chart, steps
from benchmarks.stats import percentiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult, Measurement
    from benchmarks.records import RequestRecord
    from benchmarks.report.charts import Point

COLOURS: Final = 6
_CURVE_POINTS: Final = 200
_BINS: Final = 40
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
        self._limit_ms = {name: limit_s * 1000 for name, limit_s in result.slo_s.items()}
        self._has_itl = has_itl
        names = [variant.name for variant in result.variants]
        self._kinds = {name: f"arm{i % COLOURS}" for i, name in enumerate(names)}
        self._key = [(kind, name) for name, kind in self._kinds.items()]
        self._good = {name: _good(result.shown(name)) for name in names}

    def sections(self) -> dict[str, list[Figure]]:
        """Return the figures of each section of the report."""
        gap = "ITL" if self._has_itl else "Gaps between chunks (ICL)"
        pooled = "pooled over requests" if self._has_itl else "some chunks hold several tokens"
        gaps_s = {name: [gap for _, gap in timed_gaps(x)] for name, x in self._good.items()}
        return {
            "Latency": [
                self._latency("ttft", "TTFT", "time to first token, from sending"),
                self._latency("tpot", "TPOT", "mean time per token after the first, by request"),
                self._cdf(gap, pooled, gaps_s),
                self._latency("e2e", "E2E", "from sending to the last token"),
            ],
            "Over time": [self._ttft_over_time(), self._gaps_over_time()],
            "Under load": [self._goodput(), self._attainment()],
            "Where the time went": [self._phases(), self._kv_moved()],
            "On the workers": self._on_workers(),
        }

    def _latency(self, name: str, label: str, about: str) -> Figure:
        samples_s = {variant: values_of(records, name) for variant, records in self._good.items()}
        return self._cdf(label, about, samples_s, self._limit_ms.get(name))

    def _cdf(
        self,
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
            lines.append((self._kinds[variant], steps(points)))
        log = "x" if max(every_ms) > 20 * max(min(every_ms), 1e-3) else ""
        picture = chart(f"{label}, ms", "share of requests", lines, log=log)
        picture.limit(limit_ms, "limit", on_x=True)
        return Figure(title, about, picture, self._key)

    def _ttft_over_time(self) -> Figure:
        title = "TTFT over time"
        dots = []
        for name, records in self._good.items():
            marks = []
            for record in records:
                ms = (PER_REQUEST["ttft"](record) or 0.0) * 1000
                hint = f"{name}: {ms:.1f} ms, {record.input_tokens} prompt tokens"
                marks.append((record.scheduled_s, ms, hint))
            dots.append((self._kinds[name], marks))
        if not any(marks for _, marks in dots):
            return Figure(title, "no request was answered")
        picture = chart(_SINCE, "TTFT, ms", dots=dots)
        picture.limit(self._limit_ms.get("ttft"), "limit")
        return Figure(title, "all rounds overlaid; one dot a request", picture, self._key)

    def _gaps_over_time(self) -> Figure:
        title = "ITL over time" if self._has_itl else "Gaps between chunks over time"
        gaps = {name: timed_gaps(records) for name, records in self._good.items()}
        end_s = max((at_s for sample in gaps.values() for at_s, _ in sample), default=0.0)
        if not end_s:
            return Figure(title, "no answer had two chunks")
        width_s = end_s / _BINS
        lines: list[tuple[str, list[Point]]] = []
        for name, sample in gaps.items():
            bins: dict[int, list[float]] = {}
            for at_s, gap_s in sample:
                bins.setdefault(min(_BINS - 1, int(at_s / width_s)), []).append(gap_s * 1000)
            for percent, style in ((50, ""), (99, " thin")):
                points = [
                    ((n + 0.5) * width_s, percentiles(values, [percent])[0])
                    for n, values in sorted(bins.items())
                ]
                lines.append((self._kinds[name] + style, points))
        about = f"median (thick) and p99 (thin) in each {width_s:.2g} s, all rounds together"
        return Figure(title, about, chart(_SINCE, "ms", lines, x_end=end_s, log="y"), self._key)

    def _goodput(self) -> Figure:
        found = self._by_rate("goodput_per_s")
        figure = self._against_rate("Goodput", "requests/s within the limits", found)
        if isinstance(figure.picture, Chart):
            end = min(figure.picture.x.high, figure.picture.y.high)
            figure.picture.lines.insert(0, ("ideal", [(0.0, 0.0), (end, end)]))
        return figure

    def _attainment(self) -> Figure:
        label, found = "share of requests within the limits", self._by_rate("attainment")
        figure = self._against_rate("SLO attainment", label, found, y_end=1.0)
        if isinstance(figure.picture, Chart):
            figure.picture.limit(ATTAINMENT, f"{ATTAINMENT:.0%}")
        return figure

    def _by_rate(self, name: str) -> dict[str, list[Point]]:
        """Return the means of a figure of the SLO summary at each rate, by variant."""
        found = {}
        for variant in self._kinds:
            by_rate: dict[float, list[float]] = {}
            for m in self._result.measurements:
                slo = summarise(m.records, self._result.slo_s).slo
                if m.variant == variant and slo is not None:
                    by_rate.setdefault(m.rate_per_s, []).append(getattr(slo, name))
            found[variant] = [(rate, fmean(values)) for rate, values in sorted(by_rate.items())]
        return found

    def _against_rate(
        self, what: str, label: str, found: Mapping[str, Sequence[Point]], y_end: float = 0.0
    ) -> Figure:
        title = f"{what} against rate"
        if not self._limit_ms:
            return Figure(title, "no limits were set: give --slo-ttft and --slo-tpot")
        if not any(found.values()):
            return Figure(title, "nothing was measured")
        dots = [
            (self._kinds[name], [(x, y, f"{name}: {x:.2f}/s, {y:.2f}") for x, y in points])
            for name, points in found.items()
        ]
        lines = [(self._kinds[name], points) for name, points in found.items()]
        has_probes = any(m.kind == "probe" for m in self._result.measurements)
        only = "only the rate of the rounds; --sweep adds more"
        picture = chart("offered, requests/s", label, lines, dots, y_end=y_end)
        return Figure(title, "rounds and probes" if has_probes else only, picture, self._key)

    def _phases(self) -> Figure:
        """Means by phase, as the servers' receipts have them."""
        title = "Where the time went"
        found = {}
        for name, records in self._good.items():
            told = [r for r in records if r.receipt is not None]
            if not told:
                continue
            pieces = {
                kind: fmean(receipt_number(r.receipt, field) for r in told) * 1000
                for kind, field in _PHASES.items()
            }
            whole = fmean(PER_REQUEST["e2e"](r) or 0.0 for r in told) * 1000
            pieces["other"] = max(0.0, whole - sum(pieces.values()))
            ends = pairwise(accumulate(pieces.values(), initial=0.0))
            found[name] = [
                Span(start, end, kind, f"{kind}: {ms:.1f} ms a request")
                for (kind, ms), (start, end) in zip(pieces.items(), ends, strict=True)
            ]
        if not found:
            return Figure(title, "no answer carried a receipt")
        about = (
            "means by request, as the servers report them; a transfer counts only as far as decode "
            "waited for it; the rest of E2E is router and network"
        )
        longest = max(spans[-1].end for spans in found.values())
        picture = bars("ms a request", {name: [spans] for name, spans in found.items()}, longest)
        return Figure(title, about, picture, _PHASE_KEY)

    def _kv_moved(self) -> Figure:
        title = "KV moved"
        dots, totals = [], []
        for name, records in self._good.items():
            marks = []
            for record in records:
                mib = receipt_number(record.receipt, "transfer_bytes") / 2**20
                if mib:
                    took_ms = receipt_number(record.receipt, "transfer_s") * 1000
                    hint = f"{mib:.2f} MiB in {took_ms:.1f} ms"
                    marks.append((float(record.input_tokens), mib, hint))
            if marks:
                dots.append((self._kinds[name], marks))
                totals.append(f"{name}: {sum(mib for _, mib, _ in marks):.1f} MiB")
        if not dots:
            return Figure(title, "no KV moved between workers")
        about = f"one dot a request, of all rounds: {', '.join(totals)}"
        return Figure(title, about, chart("prompt tokens", "MiB", dots=dots), self._key)

    def _on_workers(self) -> list[Figure]:
        """The first round of each variant, request by request on its workers."""
        firsts = {name: self._result.shown(name)[:1] for name in self._kinds}
        # One scale for all, so that bars can be compared by eye.
        ends_s = [r.chunk_s[-1] for first in firsts.values() for r in _good(first)]
        figures = []
        for name, first in firsts.items():
            title = f"Requests on workers, {name}"
            rows: dict[str, list[list[Span]]] = {}
            for record in _good(first):
                for worker, spans in _spans(record).items():
                    rows.setdefault(worker, []).append(spans)
            if not rows:
                figures.append(Figure(title, "no request was answered"))
                continue
            rows = dict(sorted(rows.items(), key=lambda x: (not x[0].startswith("prefill"), x[0])))
            of = f"{first[0].kind} {first[0].number + 1}, {first[0].rate_per_s:.3g} requests/s"
            picture = bars(_SINCE, rows, max(ends_s), is_wide=True)
            figures.append(Figure(title, f"{of}; one bar a request", picture, _PHASE_KEY[:4]))
        return figures


def _good(measurements: Sequence[Measurement]) -> list[RequestRecord]:
    return [r for m in measurements for r in m.records if r.status == "ok"]


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
