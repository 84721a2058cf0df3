"""Records of requests, and latency, throughput and goodput computed from them.

====  ==========================================================================================
ttft  first token - sent
tpot  (last token - first token) / (tokens - 1); only for answers of 2 tokens or more
tt2t  second token - first token: the cost of the hand-off, which TPOT averages away
e2e   last token - sent
itl   gaps between chunks of a stream, all good requests pooled
lag   sent - scheduled: the lateness of the client, which makes a run invalid
====  ==========================================================================================

A failed request counts as infinitely slow, so that failing fast does not look fast. Times are
seconds since the start of the run on a monotonic clock. They are rounded to microseconds, so that a
record does not change when it is written and read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.errors import TargetError
from benchmarks.stats import Distribution, distribution, percentiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.client import Piece

LAG_LIMIT_S: Final = 0.05
LAG_SHARE_OF_TTFT: Final = 0.05
PHASES: Final = ("queue_s", "prefill_s", "transfer_s", "exposed_transfer_s", "decode_s")
TOTALS: Final = ("transfer_bytes", "transfer_blocks", "cached_tokens")
WORKERS: Final = ("prefill_worker", "decode_worker")
# Ranges of turns: 1, 2, 3-4, 5-8 and so on.
TURN_RANGES: Final = ("1", "2", *(f"{2**k + 1}-{2 ** (k + 1)}" for k in range(1, 12)))
NEED_TWO_TOKENS: Final = frozenset({"tpot", "tt2t"})


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """The timeline of one request. Its status is `timed_out` until it ends.

    `session`, `turn`: id of its session ("" for none) and number of the turn, from 1.
    `kept_tokens`: tokens at the start of its prompt that the previous turn had in prompt or answer.
    `index`: row in the trace. `scheduled_s`: time at which it was due. `chunk_s`: arrival of each
    chunk with tokens. `chunk_tokens`: number of tokens in each chunk, None if the endpoint does not
    report it. `input_tokens`, `output_tokens`: requested; the endpoint's own counts may be None.
    `receipt`: the server's report on the phases.
    """

    index: int
    request_id: str
    input_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] | None = field(default_factory=list)
    end_s: float | None = None
    status: Literal["ok", "failed", "timed_out"] = "timed_out"
    error: str | None = "no end before the drain timeout"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    receipt: Mapping[str, Any] | None = None
    session: str = ""
    turn: int = 1
    kept_tokens: int = 0

    def add(self, piece: Piece, at_s: float) -> None:
        """Record a chunk of the stream at its arrival."""
        for name, count in (piece.usage or {}).items():
            setattr(self, name, count)
        self.receipt = piece.receipt or self.receipt
        # Some servers send the finish reason after the last token, in a chunk without text. It has
        # no tokens, so it is not recorded.
        if piece.tokens or (piece.tokens is None and piece.text):
            self.chunk_s.append(round(at_s, 6))
            if piece.tokens is None:
                self.chunk_tokens = None
            elif self.chunk_tokens is not None:
                self.chunk_tokens.append(piece.tokens)

    def complete(self, at_s: float) -> None:
        """Record success. Raises TargetError if the answer does not have the requested length. The
        length is exact, because a shorter answer would look faster.
        """
        made = self.completion_tokens
        if made is None:
            raise TargetError("no usage in the stream (stream_options.include_usage was ignored)")
        if made != self.output_tokens:
            raise TargetError(
                f"{made} tokens instead of {self.output_tokens}: the endpoint ignored min_tokens "
                "or ignore_eos"
            )
        if not self.chunk_s:
            raise TargetError("no tokens in the stream")
        if self.chunk_tokens is None and len(self.chunk_s) == made:
            self.chunk_tokens = [1] * made
        self.end_s, self.status, self.error = round(at_s, 6), "ok", None

    def fail(self, error: str, at_s: float) -> None:
        self.end_s, self.status, self.error = round(at_s, 6), "failed", error


def _tpot(record: RequestTimeline) -> float | None:
    tokens = record.completion_tokens
    if tokens is None or tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def _tt2t(record: RequestTimeline) -> float | None:
    """Return the time from the first to the second token: 0 if one chunk has both, None if the
    token counts of chunks are unknown."""
    if record.chunk_tokens is None or sum(record.chunk_tokens) < 2:
        return None
    return record.chunk_s[0 if record.chunk_tokens[0] > 1 else 1] - record.chunk_s[0]


# Metrics with one value per successful request, in seconds. Only these can have an SLO.
PER_REQUEST: Final[Mapping[str, Callable[[RequestTimeline], float | None]]] = {
    "ttft": lambda record: record.chunk_s[0] - (record.sent_s or 0.0),
    "tpot": _tpot,
    "tt2t": _tt2t,
    "e2e": lambda record: record.chunk_s[-1] - (record.sent_s or 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSummary:
    """SLO results. `attainment`: share of all scheduled requests that met every limit.
    `goodput_per_s` and `tokens_per_s`: number of these requests, and of their output tokens, per
    second of the window."""

    limits_s: Mapping[str, float]
    attainment: float
    goodput_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptSummary:
    """Summary of the servers' receipts. Phases are in seconds. `counts`, by field of the receipt:
    requests by worker, and fallbacks by reason."""

    receipts: int
    transferred: int
    phases: Mapping[str, Distribution]
    totals: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """Figures of sessions.

    `time`: from the first request to the last token, in seconds; `waited`: `time` without pauses. A
    session with a failed turn counts as infinitely long. `ttft`: by range of turns. `hit_rate`:
    cached share of the prompts. `recomputed_tokens`: prompt tokens that were computed although the
    previous turn had them in its prompt or answer. The last two are None if the endpoint does not
    report cached tokens.
    """

    sessions: int
    turns: int
    time: Distribution | None
    waited: Distribution | None
    ttft: Mapping[str, Distribution]
    hit_rate: float | None
    recomputed_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run. Times are in seconds, rates per second.

    `window_s`: time from the first due time to the last token. `latency`: None for a metric that no
    request defines. `itl_caution`: why gaps between chunks are not gaps between tokens. `degraded`:
    why the client's lateness makes the run invalid.
    """

    requests: int
    ok: int
    failed: int
    timed_out: int
    window_s: float
    offered_per_s: float
    completed_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    latency: Mapping[str, Distribution | None]
    itl: Distribution | None
    itl_caution: str | None
    lag: Distribution | None
    degraded: str | None
    slo: SloSummary | None
    errors: Mapping[str, int]
    receipts: ReceiptSummary | None
    sessions: SessionSummary | None


def summarise(
    records: Sequence[RequestTimeline], slo_s: Mapping[str, float] | None = None
) -> Summary:
    """Return the summary of records. `slo_s`: limits for metrics of PER_REQUEST."""
    good = [record for record in records if record.status == "ok"]
    bad = [record for record in records if record.status != "ok"]
    due = [record.scheduled_s for record in records] or [0.0]
    last = [record.chunk_s[-1] for record in records if record.chunk_s]
    window_s = max(last) - min(due) if last else 0.0
    latency = {}
    for name in PER_REQUEST:
        missed = sum(name not in NEED_TWO_TOKENS or record.output_tokens > 1 for record in bad)
        latency[name] = distribution(values_of(good, name) + [math.inf] * missed)
    lag = distribution([r.sent_s - r.scheduled_s for r in records if r.sent_s is not None])
    slo = None
    if slo_s:
        kept = [record for record in good if _meets(record, slo_s)]
        slo = SloSummary(
            limits_s=dict(slo_s),
            attainment=len(kept) / max(1, len(records)),
            goodput_per_s=_per_s(len(kept), window_s),
            tokens_per_s=_per_s(sum(record.output_tokens for record in kept), window_s),
        )
    return Summary(
        requests=len(records),
        ok=len(good),
        failed=sum(record.status == "failed" for record in bad),
        timed_out=sum(record.status == "timed_out" for record in bad),
        window_s=window_s,
        offered_per_s=_per_s(len(records) - 1, max(due) - min(due)),
        completed_per_s=_per_s(len(good), window_s),
        input_tokens_per_s=_per_s(sum(record.input_tokens for record in good), window_s),
        output_tokens_per_s=_per_s(sum(record.output_tokens for record in good), window_s),
        latency=latency,
        itl=distribution([gap for _, gap in timed_gaps(good)]),
        itl_caution=_itl_caution(good),
        lag=lag,
        degraded=_degraded(lag, values_of(good, "ttft")),
        slo=slo,
        errors=dict(Counter(record.error or "" for record in bad)),
        receipts=_receipts([record.receipt for record in good if record.receipt]),
        sessions=_sessions([record for record in records if record.session]),
    )


def _meets(record: RequestTimeline, slo_s: Mapping[str, float]) -> bool:
    """Return True if a successful request met every limit.

    An answer of one token meets every limit on later tokens. If the token counts of chunks are
    unknown, a limit on later tokens counts as missed.
    """
    for name, limit_s in slo_s.items():
        value = PER_REQUEST[name](record)
        is_needless = name in NEED_TWO_TOKENS and record.output_tokens < 2
        if not is_needless and (value is None or value > limit_s):
            return False
    return True


def receipt_number(receipt: Mapping[str, Any] | None, name: str) -> float:
    """Return a number from a receipt, or 0 if it is missing."""
    return float((receipt or {}).get(name) or 0)


def values_of(records: Iterable[RequestTimeline], name: str) -> list[float]:
    """Return the values of a metric of PER_REQUEST for the records that define it."""
    metric = PER_REQUEST[name]
    return [value for record in records if (value := metric(record)) is not None]


def timed_gaps(records: Iterable[RequestTimeline]) -> list[tuple[float, float]]:
    """Return (end, length) of every gap between chunks, in seconds."""
    return [(end, end - begun) for record in records for begun, end in pairwise(record.chunk_s)]


def _itl_caution(good: Sequence[RequestTimeline]) -> str | None:
    if unknown := sum(record.chunk_tokens is None for record in good):
        return f"chunks of {unknown} requests do not report their number of tokens"
    several = sum(max(record.chunk_tokens or (1,)) > 1 for record in good)
    return f"{several} requests had chunks of several tokens" if several else None


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _degraded(lag: Distribution | None, ttft_s: Sequence[float]) -> str | None:
    ttft_limit_s = LAG_SHARE_OF_TTFT * percentiles(ttft_s, 50)[0] if ttft_s else 0.0
    limit_s = max(LAG_LIMIT_S, ttft_limit_s)
    if lag is None or lag.p99 <= limit_s:
        return None
    return (
        f"the client sent late: lag p99 {lag.p99 * 1000:.0f} ms, limit {limit_s * 1000:.0f} ms; "
        "use a less busy machine or a lower rate"
    )


def _receipts(receipts: Sequence[Mapping[str, Any]]) -> ReceiptSummary | None:
    if not receipts:
        return None
    phases = {name: distribution([x[name] for x in receipts if name in x]) for name in PHASES}
    counts = {name: Counter(x[name] for x in receipts if x.get(name)) for name in WORKERS}
    counts["fallbacks"] = Counter(step for x in receipts for step in x.get("fallbacks") or ())
    return ReceiptSummary(
        receipts=len(receipts),
        transferred=sum(receipt_number(x, "transfer_bytes") > 0 for x in receipts),
        phases={name: found for name, found in phases.items() if found is not None},
        totals={name: int(sum(receipt_number(x, name) for x in receipts)) for name in TOTALS},
        counts={name: dict(sorted(found.items())) for name, found in counts.items()},
    )


def _sessions(turns: Sequence[RequestTimeline]) -> SessionSummary | None:
    if not turns:
        return None
    by_session: dict[str, list[RequestTimeline]] = {}
    ttft: list[list[float]] = [[] for _ in TURN_RANGES]
    for turn in sorted(turns, key=lambda x: x.turn):
        by_session.setdefault(turn.session, []).append(turn)
        values = ttft[min((turn.turn - 1).bit_length(), len(ttft) - 1)]
        values += values_of([turn], "ttft") if turn.status == "ok" else [math.inf]
    time_s, waited_s = [], []
    for own in by_session.values():
        is_ok = all(turn.status == "ok" for turn in own)
        first_s = own[0].sent_s or 0.0
        time_s.append(own[-1].chunk_s[-1] - first_s if is_ok else math.inf)
        waited_s.append(sum(values_of(own, "e2e")) if is_ok else math.inf)
    counted = [
        (turn.prompt_tokens or turn.input_tokens, turn.kept_tokens, turn.cached_tokens)
        for turn in turns
        if turn.cached_tokens is not None and turn.status == "ok"
    ]
    prompts = sum(prompt for prompt, _, _ in counted)
    found = {name: distribution(values) for name, values in zip(TURN_RANGES, ttft, strict=True)}
    return SessionSummary(
        sessions=len(by_session),
        turns=len(turns),
        time=distribution(time_s),
        waited=distribution(waited_s),
        ttft={name: x for name, x in found.items() if x is not None},
        hit_rate=sum(cached for _, _, cached in counted) / prompts if prompts else None,
        recomputed_tokens=sum(max(0, kept - cached) for _, kept, cached in counted)
        if prompts
        else None,
    )
