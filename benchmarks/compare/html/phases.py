"""Where time went, by the servers' own receipts: phases, KV that moved, requests on workers."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.html.figure import arm_key, arm_kind, figure, nothing
from benchmarks.compare.html.latency import good
from benchmarks.metrics import e2e_s
from benchmarks.plot.bars import Span, lanes, stacked
from benchmarks.plot.chart import Axis, Chart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.compare.result import CompareResult
    from benchmarks.plot.svg import Markup
    from benchmarks.records import RequestRecord

_PHASES: Final = (
    ("queue", "queue_s"),
    ("prefill", "prefill_s"),
    ("transfer", "exposed_transfer_s"),
    ("decode", "decode_s"),
)
_KEY: Final = [
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("transfer", "transfer, exposed"),
    ("decode", "decode"),
    ("other", "router and network"),
]
_NO_RECEIPTS: Final = "no answer carried a receipt"


def phase_bars(result: CompareResult) -> Markup:
    """The mean request's time, phase by phase."""
    title = "Where the time went"
    bars = {arm.name: _mean_phases(good(result, arm.name)) for arm in result.arms}
    bars = {name: pieces for name, pieces in bars.items() if pieces}
    if not bars:
        return nothing(title, _NO_RECEIPTS)
    about = (
        "means by request, as the servers report them; a transfer counts only as far as decoding "
        "waited for it; the rest of E2E is router and network"
    )
    return figure(title, stacked(bars, unit="ms a request", title=title), _KEY, about=about)


def kv_moved(result: CompareResult) -> Markup:
    """KV bytes by prompt length."""
    title = "KV moved"
    found: dict[str, list[tuple[float, float]]] = {}
    hints: dict[str, list[str]] = {}
    for arm in result.arms:
        for record in good(result, arm.name):
            moved = _number(record.receipt, "transfer_bytes")
            if moved:
                took_ms = _number(record.receipt, "transfer_s") * 1000
                found.setdefault(arm.name, []).append((record.input_tokens, moved / 2**20))
                hints.setdefault(arm.name, []).append(
                    f"{moved / 2**20:.2f} MiB in {took_ms:.1f} ms"
                )
    every = [point for points in found.values() for point in points]
    if not every:
        return nothing(title, "no KV moved between workers")
    chart = Chart(
        Axis("prompt tokens", tuple(x for x, _ in every)),
        Axis("MiB", tuple(y for _, y in every)),
        title=title,
    )
    for name, points in found.items():
        chart.dots(points, arm_kind(result, name), hints[name])
    totals = [f"{name}: {sum(y for _, y in points):.1f} MiB" for name, points in found.items()]
    about = f"one dot a request, of all rounds: {', '.join(totals)}"
    return figure(title, chart.svg(), arm_key(result), about=about)


def gantts(result: CompareResult) -> list[Markup]:
    """The first round of each arm, request by request on the workers that served them."""
    records = {arm.name: _first_round(result, arm.name) for arm in result.arms}
    # One scale for all, so that bars can be compared by eye.
    end_s = max((r.chunk_s[-1] for found in records.values() for r in found), default=0.0)
    return [_gantt(result, name, found, end_s) for name, found in records.items()]


def _first_round(result: CompareResult, arm: str) -> list[RequestRecord]:
    measured = result.of(arm, "round") or result.of(arm, "probe")
    return [r for m in measured[:1] for r in m.records if r.status == "ok"]


def _gantt(
    result: CompareResult, arm: str, records: Sequence[RequestRecord], end_s: float
) -> Markup:
    title = f"Requests on workers, {arm}"
    if not records:
        return nothing(title, "no request was answered")
    rows: dict[str, list[list[Span]]] = {}
    for record in records:
        for worker, spans in _spans(record).items():
            rows.setdefault(worker, []).append(spans)
    svg = lanes(dict(sorted(rows.items(), key=_prefill_first)), end_s=end_s, title=title)
    first = (result.of(arm, "round") or result.of(arm, "probe"))[0]
    about = f"{first.kind} {first.number + 1}, {first.rate_per_s:.3g} requests/s; one bar a request"
    return figure(title, svg, _KEY[:4], about=about, wide=True)


def _spans(record: RequestRecord) -> dict[str, list[Span]]:
    """A request as spans on its workers: times at the client, lengths by the receipt."""
    sent_s, first_s, last_s = record.sent_s or 0.0, record.chunk_s[0], record.chunk_s[-1]
    hint = f"{record.input_tokens} prompt tokens, {record.output_tokens} out"
    if record.receipt is None:
        waited = Span(sent_s, first_s, "prefill", f"to first token: {hint}")
        return {"endpoint": [waited, Span(first_s, last_s, "decode", f"decode: {hint}")]}
    begun_s = max(sent_s, first_s - _number(record.receipt, "prefill_s"))
    source = str(record.receipt.get("prefill_worker") or "worker")
    target = str(record.receipt.get("decode_worker") or source)
    found = {
        source: [
            Span(sent_s, begun_s, "queue", f"queue: {hint}"),
            Span(begun_s, first_s, "prefill", f"prefill: {hint}"),
        ]
    }
    moved_s = min(last_s, first_s + _number(record.receipt, "exposed_transfer_s"))
    found.setdefault(target, []).extend(
        [
            Span(first_s, moved_s, "transfer", f"transfer, exposed: {hint}"),
            Span(moved_s, last_s, "decode", f"decode: {hint}"),
        ]
    )
    return found


def _prefill_first(row: tuple[str, object]) -> tuple[int, str]:
    order = ("prefill", "decode")
    role = row[0].rpartition("-")[0]
    return (order.index(role) if role in order else len(order), row[0])


def _mean_phases(records: Sequence[RequestRecord]) -> list[tuple[str, float]]:
    told = [record for record in records if record.receipt is not None]
    if not told:
        return []
    pieces = [
        (name, fmean(_number(record.receipt, field) for record in told) * 1000)
        for name, field in _PHASES
    ]
    whole = fmean(e2e_s(record) or 0.0 for record in told) * 1000
    return [*pieces, ("other", max(0.0, whole - sum(value for _, value in pieces)))]


def _number(receipt: Mapping[str, Any] | None, name: str) -> float:
    value = (receipt or {}).get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
