"""Latency, throughput and goodput: pure functions of request records.

============  ==================================================================================
ttft          first token − sent
ttft_sched    first token − scheduled: what a user who came on time saw, client lag included
tpot          (last token − first token) / (tokens − 1); only for answers of 2 tokens or more
tt2t          second token − first token: where prefill and decode are apart, the hand-off's cost,
              which TPOT averages away
e2e           last token − sent
e2e_sched     last token − scheduled
icl           gaps between chunks, all requests pooled
itl           gaps between tokens, pooled; only where every chunk brought one token
lag           sent − scheduled
============  ==================================================================================

Percentiles are of requests that ended well. The ``adjusted`` ones count every request that did not
as infinitely slow, so that failing fast does not look fast.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchmarks.receipts import ReceiptSummary, summarise_receipts
from benchmarks.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.records import RequestRecord

LAG_LIMIT_S: Final = 0.05
LAG_SHARE_OF_TTFT: Final = 0.05


def ttft_s(record: RequestRecord) -> float | None:
    """Sending to first token."""
    return (
        record.chunk_s[0] - record.sent_s if record.chunk_s and record.sent_s is not None else None
    )


def ttft_sched_s(record: RequestRecord) -> float | None:
    """Due time to first token."""
    return record.chunk_s[0] - record.scheduled_s if record.chunk_s else None


def e2e_s(record: RequestRecord) -> float | None:
    """Sending to last token."""
    return (
        record.chunk_s[-1] - record.sent_s if record.chunk_s and record.sent_s is not None else None
    )


def e2e_sched_s(record: RequestRecord) -> float | None:
    """Due time to last token."""
    return record.chunk_s[-1] - record.scheduled_s if record.chunk_s else None


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per token after the first."""
    tokens = record.completion_tokens
    if not record.chunk_s or tokens is None or tokens < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (tokens - 1)


def tt2t_s(record: RequestRecord) -> float | None:
    """First token to second; 0 if one chunk brought both, None if chunks are not counted."""
    if record.chunk_tokens is None or sum(record.chunk_tokens) < 2:
        return None
    second = 0 if record.chunk_tokens[0] > 1 else 1
    return record.chunk_s[second] - record.chunk_s[0]


def lag_s(record: RequestRecord) -> float | None:
    """Due time to sending."""
    return None if record.sent_s is None else record.sent_s - record.scheduled_s


PER_REQUEST: Final[Mapping[str, Callable[[RequestRecord], float | None]]] = {
    "ttft": ttft_s,
    "ttft_sched": ttft_sched_s,
    "tpot": tpot_s,
    "tt2t": tt2t_s,
    "e2e": e2e_s,
    "e2e_sched": e2e_sched_s,
}
"""The metrics that one request has one value of, in seconds; these can carry an SLO."""

NEED_TWO_TOKENS: Final = frozenset({"tpot", "tt2t"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSummary:
    """``attainment`` is the share of all requests scheduled that met every limit; ``goodput_per_s``
    is their number over the window."""

    limits_s: Mapping[str, float]
    attainment: float
    goodput_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run comes to. Times in seconds, rates per second.

    ``window_s`` runs from the first due time to the last token. ``latency`` and ``adjusted`` have
    None for a metric that no request defines; ``itl`` is None, with ``itl_omitted`` saying why, if
    some chunk held several tokens. ``degraded`` says why the client's own lateness spoils the run.
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
    adjusted: Mapping[str, Distribution | None]
    icl: Distribution | None
    itl: Distribution | None
    itl_omitted: str | None
    lag: Distribution | None
    degraded: str | None
    slo: SloSummary | None
    errors: Mapping[str, int]
    receipts: ReceiptSummary | None


def summarise(
    records: Sequence[RequestRecord], slo_s: Mapping[str, float] | None = None
) -> Summary:
    """Sum up a run's records; ``slo_s`` has a limit for some of :data:`PER_REQUEST`."""
    good = [record for record in records if record.status == "ok"]
    window_s = _window_s(records)
    due = [record.scheduled_s for record in records]
    latency = {name: distribution(_values(good, name)) for name in PER_REQUEST}
    lag = distribution([lag for record in records if (lag := lag_s(record)) is not None])
    itl_omitted = _itl_omitted(good)
    gaps = [gap for record in good for gap in _gaps(record)]
    return Summary(
        requests=len(records),
        ok=len(good),
        failed=sum(record.status == "failed" for record in records),
        timed_out=sum(record.status == "timed_out" for record in records),
        window_s=window_s,
        offered_per_s=_per_s(len(records) - 1, max(due) - min(due)) if records else 0.0,
        completed_per_s=_per_s(len(good), window_s),
        input_tokens_per_s=_per_s(sum(record.input_tokens for record in good), window_s),
        output_tokens_per_s=_per_s(sum(record.output_tokens for record in good), window_s),
        latency=latency,
        adjusted={name: distribution(_adjusted(records, name)) for name in PER_REQUEST},
        icl=distribution(gaps),
        itl=distribution(gaps) if itl_omitted is None else None,
        itl_omitted=itl_omitted,
        lag=lag,
        degraded=_degraded(lag, latency["ttft"]),
        slo=_slo(records, slo_s, window_s) if slo_s else None,
        errors=dict(Counter(record.error or "" for record in records if record.status != "ok")),
        receipts=summarise_receipts([record.receipt for record in good if record.receipt]),
    )


def meets(record: RequestRecord, slo_s: Mapping[str, float]) -> bool:
    """Whether a request ended well and kept every limit.

    A limit on later tokens is kept by an answer of one token, and missed where the endpoint's
    chunks do not show when they came.
    """
    if record.status != "ok":
        return False
    for name, limit_s in slo_s.items():
        if name in NEED_TWO_TOKENS and record.output_tokens < 2:
            continue
        value = PER_REQUEST[name](record)
        if value is None or value > limit_s:
            return False
    return True


def _values(records: Sequence[RequestRecord], name: str) -> list[float]:
    metric = PER_REQUEST[name]
    return [value for record in records if (value := metric(record)) is not None]


def _adjusted(records: Sequence[RequestRecord], name: str) -> list[float]:
    good = [record for record in records if record.status == "ok"]
    missed = sum(
        record.status != "ok" and (name not in NEED_TWO_TOKENS or record.output_tokens > 1)
        for record in records
    )
    return _values(good, name) + [math.inf] * missed


def _gaps(record: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in pairwise(record.chunk_s)]


def _itl_omitted(good: Sequence[RequestRecord]) -> str | None:
    uncounted = sum(record.chunk_tokens is None for record in good)
    several = sum(max(record.chunk_tokens or (1,)) > 1 for record in good)
    if uncounted:
        return (
            f"chunks of {uncounted} requests do not tell how many tokens they hold; "
            "those are left out of TT2T too"
        )
    if several:
        return f"{several} requests had chunks of several tokens"
    return None


def _window_s(records: Sequence[RequestRecord]) -> float:
    last_tokens = [record.chunk_s[-1] for record in records if record.chunk_s]
    if not last_tokens:
        return 0.0
    return max(last_tokens) - min(record.scheduled_s for record in records)


def _per_s(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _degraded(lag: Distribution | None, ttft: Distribution | None) -> str | None:
    if lag is None:
        return None
    limit_s = max(LAG_LIMIT_S, LAG_SHARE_OF_TTFT * ttft.p50) if ttft is not None else LAG_LIMIT_S
    if lag.p99 <= limit_s:
        return None
    return (
        f"the client sent late: lag p99 {lag.p99 * 1000:.0f} ms, over {limit_s * 1000:.0f} ms; "
        "replay from a less busy machine or with a lower --speedup"
    )


def _slo(
    records: Sequence[RequestRecord], slo_s: Mapping[str, float], window_s: float
) -> SloSummary:
    met = sum(meets(record, slo_s) for record in records)
    return SloSummary(
        limits_s=dict(slo_s),
        attainment=met / len(records) if records else 0.0,
        goodput_per_s=_per_s(met, window_s),
    )
