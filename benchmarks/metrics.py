"""What is recorded of a request, and latency, throughput and goodput computed from it.

====  ==========================================================================================
ttft  first token - sent
tpot  (last token - first token) / (tokens - 1); only for answers of 2 tokens or more
tt2t  second token - first token: the cost of the hand-off, which TPOT averages away
e2e   last token - sent
itl   gaps between chunks of a stream, all good requests pooled
lag   sent - scheduled: the lateness of the client, which spoils a run
====  ==========================================================================================

A request that did not end well counts as infinitely slow, so that failing fast does not look fast.
Times are seconds since the start of the run on a monotonic clock, rounded to microseconds, so that
a record does not change when it is written and read.
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
NEED_TWO_TOKENS: Final = frozenset({"tpot", "tt2t"})


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The timeline of one request; until it ends it is `timed_out`.

    `index` is its row in the trace, `scheduled_s` the time it was due. `chunk_s` holds the arrival
    of each piece of the stream that brought tokens, `chunk_tokens` how many each brought (None if
    the endpoint does not tell). `input_tokens` and `output_tokens` were requested; the counts the
    endpoint reported may be None. `receipt` is the server's report on the phases.
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

    def add(self, piece: Piece, at_s: float) -> None:
        """Note a piece of the stream at its arrival."""
        for name, count in (piece.usage or {}).items():
            setattr(self, name, count)
        self.receipt = piece.receipt or self.receipt
        # Some servers send the finish reason after the last token, in a piece without text.
        if piece.tokens or (piece.tokens is None and piece.text):
            self.chunk_s.append(round(at_s, 6))
            if piece.tokens is None:
                self.chunk_tokens = None
            elif self.chunk_tokens is not None:
                self.chunk_tokens.append(piece.tokens)

    def complete(self, at_s: float) -> None:
        """Note a good end. Raises TargetError if the answer does not have the requested length.

        Each request asks for an exact number of tokens: a shorter answer would look faster.
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


def _tpot(record: RequestRecord) -> float | None:
    tokens = record.completion_tokens
    if tokens is None or tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def _tt2t(record: RequestRecord) -> float | None:
    """0 if one chunk brought both tokens, None if chunks do not tell what they hold."""
    if record.chunk_tokens is None or sum(record.chunk_tokens) < 2:
        return None
    return record.chunk_s[0 if record.chunk_tokens[0] > 1 else 1] - record.chunk_s[0]


# Metrics with one value a request that ended well, in seconds. These can carry an SLO.
PER_REQUEST: Final[Mapping[str, Callable[[RequestRecord], float | None]]] = {
    "ttft": lambda record: record.chunk_s[0] - (record.sent_s or 0.0),
    "tpot": _tpot,
    "tt2t": _tt2t,
    "e2e": lambda record: record.chunk_s[-1] - (record.sent_s or 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSummary:
    """`attainment` is the share of all scheduled requests that met every limit, `goodput_per_s`
    their number over the window, and `tokens_per_s` that of their output tokens."""

    limits_s: Mapping[str, float]
    attainment: float
    goodput_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptSummary:
    """The servers' own reports. Phases in seconds; `counts` by field of the receipt: of requests by
    worker, and of fallbacks."""

    receipts: int
    transferred: int
    phases: Mapping[str, Distribution]
    totals: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run. Times in seconds, rates per second.

    `window_s` runs from the first due time to the last token. `latency` holds None for a metric
    that no request defines. `itl_caution` says why gaps between chunks are not gaps between tokens,
    `degraded` why the client's own lateness spoils the run.
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


def summarise(
    records: Sequence[RequestRecord], slo_s: Mapping[str, float] | None = None
) -> Summary:
    """Sum up records. `slo_s` limits some of PER_REQUEST."""
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
    )


def _meets(record: RequestRecord, slo_s: Mapping[str, float]) -> bool:
    """Return True if a request that ended well met every limit.

    An answer of one token meets a limit on later tokens. An endpoint whose chunks do not tell when
    tokens came misses it.
    """
    for name, limit_s in slo_s.items():
        value = PER_REQUEST[name](record)
        is_needless = name in NEED_TWO_TOKENS and record.output_tokens < 2
        if not is_needless and (value is None or value > limit_s):
            return False
    return True


def receipt_number(receipt: Mapping[str, Any] | None, name: str) -> float:
    """Return a number of a receipt, 0 if it lacks it."""
    return float((receipt or {}).get(name) or 0)


def values_of(records: Iterable[RequestRecord], name: str) -> list[float]:
    """Return the values of a metric in PER_REQUEST, of those good records that define it."""
    metric = PER_REQUEST[name]
    return [value for record in records if (value := metric(record)) is not None]


def timed_gaps(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """Return (end, length) of every gap between chunks, in seconds."""
    return [(end, end - begun) for record in records for begun, end in pairwise(record.chunk_s)]


def _itl_caution(good: Sequence[RequestRecord]) -> str | None:
    if unknown := sum(record.chunk_tokens is None for record in good):
        return f"chunks of {unknown} requests do not tell how many tokens they hold"
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
