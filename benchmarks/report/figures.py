"""The pictures of report.html."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchmarks.compare.run import ATTAINMENT
from benchmarks.metrics import PER_REQUEST, receipt_number, summarise
from benchmarks.report.svg import Axis, Chart, Markup, Span, join, lanes, stacked, tag
from benchmarks.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.records import RequestRecord
    from benchmarks.report.svg import Point

COLOURS: Final = 6
_CURVE_POINTS: Final = 200
_BINS: Final = 40
_PHASES: Final = (
    ("queue", "queue_s"),
    ("prefill", "prefill_s"),
    ("transfer", "exposed_transfer_s"),
    ("decode", "decode_s"),
)
_PHASE_KEY: Final = [
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("transfer", "transfer, exposed"),
    ("decode", "decode"),
    ("other", "router and network"),
]


def sections(result: CompareResult, *, has_itl: bool) -> list[Markup]:
    """Return all sections of the report."""
    return [
        _section("Latency", *(_cdf(result, *x) for x in _quantities(has_itl=has_itl))),
        _section("Over time", _ttft_over_time(result), _gaps_over_time(result, has_itl=has_itl)),
        _section(
            "Under load",
            _against_rate(result, "Goodput against rate", "requests/s within the limits"),
            _against_rate(
                result,
                "SLO attainment against rate",
                "share of requests within the limits",
                is_share=True,
            ),
        ),
        _section("Where the time went", _phase_bars(result), _kv_moved(result)),
        _section("On the workers", *_gantts(result)),
    ]


def _section(name: str, *figures: Markup) -> Markup:
    return tag("section", tag("h2", name), tag("div", *figures, class_="figures"))


def _figure(
    title: str, svg: Markup, key: Sequence[tuple[str, str]], about: str, *, wide: bool = False
) -> Markup:
    entries = [tag("span", tag("i", "", class_=kind), name) for kind, name in key]
    parts = [tag("h3", title), tag("p", join(entries), class_="key"), svg]
    return tag("figure", *parts, tag("figcaption", about), class_="wide" if wide else None)


def _nothing(title: str, why: str) -> Markup:
    return tag("figure", tag("h3", title), tag("p", why, class_="none"))


def _kind(result: CompareResult, name: str) -> str:
    """The CSS class of a variant's marks."""
    return f"arm{[x.name for x in result.variants].index(name) % COLOURS}"


def _key(result: CompareResult) -> list[tuple[str, str]]:
    return [(_kind(result, x.name), x.name) for x in result.variants]


def _good(result: CompareResult, name: str) -> list[RequestRecord]:
    return [r for m in result.shown(name) for r in m.records if r.status == "ok"]


# -- latency


def _quantities(*, has_itl: bool) -> list[tuple[str, str, str]]:
    gap = "ITL" if has_itl else "Gaps between chunks (ICL)"
    return [
        ("ttft", "TTFT", "time to first token, from sending"),
        ("tpot", "TPOT", "mean time per token after the first, by request"),
        ("gap", gap, "pooled over requests" if has_itl else "some chunks hold several tokens"),
        ("e2e", "E2E", "from sending to the last token"),
    ]


def _cdf(result: CompareResult, name: str, label: str, about: str) -> Markup:
    title = f"{label}, cumulative"
    samples = {x.name: sorted(_values(_good(result, x.name), name)) for x in result.variants}
    every = [value for sample in samples.values() for value in sample]
    if not every:
        return _nothing(title, "no request has one")
    is_log = max(every) > 20 * max(min(every), 1e-3)
    chart = Chart(
        Axis(f"{label}, ms", every, is_log), Axis("share of requests", (0.0, 1.0)), title=title
    )
    limit = result.slo_s.get(name)
    if limit is not None and limit * 1000 <= chart.x.high:
        chart.limit(limit * 1000, "limit")
    for variant, sample in samples.items():
        stride = max(1, len(sample) // _CURVE_POINTS)
        kept = sorted({*range(0, len(sample), stride), len(sample) - 1}) if sample else []
        chart.steps([(sample[i], (i + 1) / len(sample)) for i in kept], _kind(result, variant))
    return _figure(title, chart.svg(), _key(result), about)


def _values(records: Sequence[RequestRecord], name: str) -> list[float]:
    if name == "gap":
        return [gap for _, gap in _timed_gaps(records)]
    metric = PER_REQUEST[name]
    return [value * 1000 for record in records if (value := metric(record)) is not None]


def _timed_gaps(records: Sequence[RequestRecord]) -> list[Point]:
    """Return (end in s, length in ms) of every gap between chunks."""
    return [
        (later, (later - earlier) * 1000)
        for record in records
        for earlier, later in pairwise(record.chunk_s)
    ]


def _ttft_over_time(result: CompareResult) -> Markup:
    title = "TTFT over time"
    found = {x.name: [r for r in _good(result, x.name) if r.chunk_s] for x in result.variants}
    points = {
        name: [(r.scheduled_s, (PER_REQUEST["ttft"](r) or 0.0) * 1000) for r in records]
        for name, records in found.items()
    }
    every = [point for sample in points.values() for point in sample]
    if not every:
        return _nothing(title, "no request was answered")
    chart = Chart(
        Axis("s since the round began", [x for x, _ in every]),
        Axis("TTFT, ms", [y for _, y in every]),
        title=title,
    )
    if (limit := result.slo_s.get("ttft")) is not None and limit * 1000 <= chart.y.high:
        chart.level(limit * 1000, "limit")
    for name, records in found.items():
        hints = [
            f"{name}: {y:.1f} ms, {r.input_tokens} prompt tokens"
            for r, (_, y) in zip(records, points[name], strict=True)
        ]
        chart.dots(points[name], _kind(result, name), hints)
    return _figure(title, chart.svg(), _key(result), "all rounds overlaid; one dot a request")


def _gaps_over_time(result: CompareResult, *, has_itl: bool) -> Markup:
    title = "ITL over time" if has_itl else "Gaps between chunks over time"
    gaps = {x.name: _timed_gaps(_good(result, x.name)) for x in result.variants}
    every = [gap for sample in gaps.values() for gap in sample]
    if not every:
        return _nothing(title, "no answer had two chunks")
    width_s = max(at_s for at_s, _ in every) / _BINS
    curves: dict[str, list[list[Point]]] = {}
    for name, sample in gaps.items():
        bins: dict[int, list[float]] = {}
        for at_s, value in sample:
            bins.setdefault(min(_BINS - 1, int(at_s / width_s)), []).append(value)
        curves[name] = [
            [((n + 0.5) * width_s, percentile(x, p)) for n, x in sorted(bins.items())]
            for p in (50, 99)
        ]
    shown = [value for lines in curves.values() for line in lines for _, value in line]
    chart = Chart(
        Axis("s since the round began", (0.0, width_s * _BINS)),
        Axis("ms", shown, is_log=True),
        title=title,
    )
    for name, (middle, upper) in curves.items():
        chart.line(middle, _kind(result, name))
        chart.line(upper, f"{_kind(result, name)} thin")
    about = f"median (thick) and p99 (thin) in each {width_s:.2g} s, all rounds together"
    return _figure(title, chart.svg(), _key(result), about)


# -- load


def _against_rate(
    result: CompareResult, title: str, label: str, *, is_share: bool = False
) -> Markup:
    if not result.slo_s:
        return _nothing(title, "no limits were set: give --slo-ttft and --slo-tpot")
    found = {x.name: _by_rate(result, x.name, is_share=is_share) for x in result.variants}
    every = [point for points in found.values() for point in points]
    if not every:
        return _nothing(title, "nothing was measured")
    heights = [0.0, 1.0] if is_share else [y for _, y in every]
    chart = Chart(
        Axis("offered, requests/s", [x for x, _ in every]), Axis(label, heights), title=title
    )
    if is_share:
        chart.level(ATTAINMENT, f"{ATTAINMENT:.0%}")
    else:
        end = min(chart.x.high, chart.y.high)
        chart.line([(0.0, 0.0), (end, end)], "ideal")
    for name, points in found.items():
        chart.line(points, _kind(result, name))
        chart.dots(points, _kind(result, name), [f"{name}: {x:.2f}/s, {y:.2f}" for x, y in points])
    has_probes = any(m.kind == "probe" for m in result.measurements)
    about = "rounds and probes" if has_probes else "only the rate of the rounds; --sweep adds more"
    return _figure(title, chart.svg(), _key(result), about)


def _by_rate(result: CompareResult, name: str, *, is_share: bool) -> list[Point]:
    by_rate: dict[float, list[float]] = {}
    for measurement in (*result.of(name, "round"), *result.of(name, "probe")):
        slo = summarise(measurement.records, result.slo_s).slo
        if slo is not None:
            value = slo.attainment if is_share else slo.goodput_per_s
            by_rate.setdefault(measurement.rate_per_s, []).append(value)
    return [(rate, fmean(values)) for rate, values in sorted(by_rate.items())]


# -- phases, by the servers' receipts


def _phase_bars(result: CompareResult) -> Markup:
    title = "Where the time went"
    bars = {}
    for variant in result.variants:
        told = [r for r in _good(result, variant.name) if r.receipt is not None]
        if told:
            pieces = [
                (name, fmean(receipt_number(r.receipt, field) for r in told) * 1000)
                for name, field in _PHASES
            ]
            whole = fmean(PER_REQUEST["e2e"](r) or 0.0 for r in told) * 1000
            other = max(0.0, whole - sum(value for _, value in pieces))
            bars[variant.name] = [*pieces, ("other", other)]
    if not bars:
        return _nothing(title, "no answer carried a receipt")
    about = (
        "means by request, as the servers report them; a transfer counts only as far as decode "
        "waited for it; the rest of E2E is router and network"
    )
    return _figure(title, stacked(bars, unit="ms a request", title=title), _PHASE_KEY, about)


def _kv_moved(result: CompareResult) -> Markup:
    title = "KV moved"
    found: dict[str, list[tuple[Point, str]]] = {}
    for variant in result.variants:
        for record in _good(result, variant.name):
            mib = receipt_number(record.receipt, "transfer_bytes") / 2**20
            if mib:
                took_ms = receipt_number(record.receipt, "transfer_s") * 1000
                hint = f"{mib:.2f} MiB in {took_ms:.1f} ms"
                found.setdefault(variant.name, []).append(((record.input_tokens, mib), hint))
    every = [point for marks in found.values() for point, _ in marks]
    if not every:
        return _nothing(title, "no KV moved between workers")
    chart = Chart(
        Axis("prompt tokens", [x for x, _ in every]),
        Axis("MiB", [y for _, y in every]),
        title=title,
    )
    for name, marks in found.items():
        chart.dots([point for point, _ in marks], _kind(result, name), [hint for _, hint in marks])
    totals = [f"{name}: {sum(p[1] for p, _ in marks):.1f} MiB" for name, marks in found.items()]
    about = f"one dot a request, of all rounds: {', '.join(totals)}"
    return _figure(title, chart.svg(), _key(result), about)


def _gantts(result: CompareResult) -> list[Markup]:
    """The first round of each variant, request by request on its workers."""
    records = {
        x.name: [r for m in result.shown(x.name)[:1] for r in m.records if r.status == "ok"]
        for x in result.variants
    }
    # One scale for all, so that bars can be compared by eye.
    end_s = max((r.chunk_s[-1] for found in records.values() for r in found), default=0.0)
    return [_gantt(result, name, found, end_s) for name, found in records.items()]


def _gantt(
    result: CompareResult, name: str, records: Sequence[RequestRecord], end_s: float
) -> Markup:
    title = f"Requests on workers, {name}"
    if not records:
        return _nothing(title, "no request was answered")
    rows: dict[str, list[list[Span]]] = {}
    for record in records:
        for worker, spans in _spans(record).items():
            rows.setdefault(worker, []).append(spans)

    def prefill_first(row: tuple[str, object]) -> tuple[int, str]:
        order = {"prefill": 0, "decode": 1}
        return order.get(row[0].rpartition("-")[0], 2), row[0]

    svg = lanes(dict(sorted(rows.items(), key=prefill_first)), end_s=end_s, title=title)
    first = result.shown(name)[0]
    about = f"{first.kind} {first.number + 1}, {first.rate_per_s:.3g} requests/s; one bar a request"
    return _figure(title, svg, _PHASE_KEY[:4], about, wide=True)


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
