"""Metrics, computed exactly from timelines written by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import metrics
from benchmarks.metrics import summarise
from benchmarks.stats import distribution, percentile

if TYPE_CHECKING:
    from conftest import RecordMaker

    from benchmarks.records import RequestRecord


def test_one_request_s_latencies(make_record: RecordMaker) -> None:
    record = make_record(1.0, 1.25, [2.0, 2.5, 2.625, 2.75])
    assert metrics.lag_s(record) == 0.25
    assert metrics.ttft_s(record) == 0.75
    assert metrics.ttft_sched_s(record) == 1.0
    assert metrics.tt2t_s(record) == 0.5
    assert metrics.tpot_s(record) == 0.25
    assert metrics.e2e_s(record) == 1.5
    assert metrics.e2e_sched_s(record) == 1.75


def test_one_token_has_no_time_per_later_token(make_record: RecordMaker) -> None:
    record = make_record(0.0, 0.0, [0.5])
    assert metrics.tpot_s(record) is None
    assert metrics.tt2t_s(record) is None
    assert metrics.ttft_s(record) == metrics.e2e_s(record) == 0.5
    summary = summarise([record], {"tpot": 0.001, "ttft": 1.0})
    assert summary.latency["tpot"] is None
    assert summary.icl is None
    assert summary.slo is not None
    assert summary.slo.attainment == 1.0


UNCOUNTED = (
    "chunks of 1 requests do not tell how many tokens they hold; those are left out of TT2T too"
)


@pytest.mark.parametrize(
    ("chunk_tokens", "tt2t", "omitted"),
    [
        ((1, 1, 1), 0.5, None),
        ((2, 1, 1), 0.0, "1 requests had chunks of several tokens"),
        ((1, 3, 1), 0.5, "1 requests had chunks of several tokens"),
        (None, None, UNCOUNTED),
    ],
)
def test_chunks_are_taken_for_tokens_only_where_they_are(
    make_record: RecordMaker,
    chunk_tokens: tuple[int, ...] | None,
    tt2t: float | None,
    omitted: str | None,
) -> None:
    tokens = sum(chunk_tokens or (5,))
    record = make_record(0.0, 0.0, [1.0, 1.5, 3.0], chunk_tokens=chunk_tokens, output_tokens=tokens)
    assert metrics.tt2t_s(record) == tt2t
    assert metrics.tpot_s(record) == 2.0 / (tokens - 1)
    summary = summarise([record])
    assert summary.itl_omitted == omitted
    assert (summary.itl is None) == (omitted is not None)
    assert summary.icl is not None
    assert (summary.icl.count, summary.icl.mean) == (2, 1.0)
    # A limit that the endpoint gives no means to check is not met.
    assert metrics.meets(record, {"tt2t": 0.75}) == (tt2t is not None)


def test_failures_are_left_out_of_percentiles_but_count_as_infinite(
    make_record: RecordMaker,
) -> None:
    good = [make_record(float(i), float(i), [i + 0.5, i + 0.75]) for i in range(3)]
    bad = [
        make_record(3.0, 3.0, [], status="failed", output_tokens=1),
        make_record(4.0, 4.0, [4.125], status="timed_out", output_tokens=9),
    ]
    summary = summarise(good + bad)
    assert (summary.requests, summary.ok, summary.failed, summary.timed_out) == (5, 3, 1, 1)
    assert summary.errors == {"it failed": 1, "it timed_out": 1}
    ttft, adjusted = summary.latency["ttft"], summary.adjusted["ttft"]
    assert ttft is not None
    assert (ttft.count, ttft.max) == (3, 0.5)
    assert adjusted is not None
    assert (adjusted.count, adjusted.p50, adjusted.p90) == (5, 0.5, math.inf)
    # The failed request of one token never had a second one to be late with.
    tpot = summary.adjusted["tpot"]
    assert tpot is not None
    assert (tpot.count, tpot.p50, tpot.max) == (4, 0.25, math.inf)


def test_goodput_counts_misses_and_failures_against_all_requests(make_record: RecordMaker) -> None:
    records = [
        make_record(0.0, 0.0, [0.1, 0.2]),
        make_record(1.0, 1.0, [1.1, 1.9]),
        make_record(2.0, 2.0, [2.9, 3.0]),
        make_record(3.0, 3.0, [], status="failed", output_tokens=2),
        make_record(3.5, 3.5, [3.6, 4.0]),
    ]
    slo = summarise(records, {"ttft": 0.5, "tpot": 0.5}).slo
    assert slo is not None
    assert slo.attainment == 2 / 5
    assert slo.goodput_per_s == 2 / 4.0


def test_rates_are_of_the_window_from_first_due_to_last_token(make_record: RecordMaker) -> None:
    records = [make_record(1.0, 1.5, [2.0, 3.0]), make_record(2.0, 2.0, [4.0, 5.0, 6.0])]
    summary = summarise(records)
    assert summary.window_s == 5.0
    assert summary.offered_per_s == 1.0
    assert summary.completed_per_s == 2 / 5
    assert summary.input_tokens_per_s == 200 / 5
    assert summary.output_tokens_per_s == 5 / 5


def test_a_stall_shows_in_latency_from_schedule_however_the_client_waits(
    make_record: RecordMaker,
) -> None:
    # The server answers in 10 ms, but is stopped from 1 s to 3 s; one request is due every 100 ms.
    due = [i / 10 for i in range(40)]

    def done_s(sent_s: float) -> float:
        return (3.0 if 1.0 <= sent_s < 3.0 else sent_s) + 0.01

    open_loop = [make_record(at, at, [done_s(at)]) for at in due]
    closed_loop, free_s = [], 0.0
    for at in due:
        sent_s = max(at, free_s)
        free_s = done_s(sent_s)
        closed_loop.append(make_record(at, sent_s, [free_s]))

    def slow(records: list[RequestRecord], name: str) -> int:
        return sum((metrics.PER_REQUEST[name](record) or 0) > 0.1 for record in records)

    assert slow(open_loop, "ttft") == slow(open_loop, "ttft_sched") == 20
    assert slow(closed_loop, "ttft") == 1
    assert slow(closed_loop, "ttft_sched") >= 19
    assert summarise(open_loop).degraded is None
    assert "sent late" in (summarise(closed_loop).degraded or "")


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "degraded"),
    [(0.05, 0.1, False), (0.0625, 0.1, True), (0.0625, 2.0, False), (0.2, 2.0, True)],
)
def test_a_run_is_degraded_when_the_client_lags_by_more_than_matters(
    make_record: RecordMaker, lag_s: float, ttft_s: float, *, degraded: bool
) -> None:
    summary = summarise([make_record(0.0, lag_s, [lag_s + ttft_s])])
    assert (summary.degraded is not None) == degraded


def test_nothing_measured_is_not_zero_latency(make_record: RecordMaker) -> None:
    summary = summarise([make_record(0.0, 0.0, [], status="failed", output_tokens=3)])
    assert set(summary.latency.values()) == {None}
    assert summary.window_s == summary.completed_per_s == 0.0
    assert summarise([]).requests == 0


def test_receipts_are_summed_up_by_phase(make_record: RecordMaker) -> None:
    receipts = [
        {
            "queue_s": 0.0,
            "prefill_s": 0.25 * i,
            "transfer_s": 0.5,
            "decode_s": 1.0,
            "transfer_bytes": 1000 * i,
            "transfer_blocks": i,
            "cached_tokens": 16,
            "prefill_worker": "p0",
            "decode_worker": f"d{i % 2}",
            "first_token_source": "prefill",
            "fallbacks": ["local_prefill"] if i == 0 else [],
        }
        for i in range(3)
    ]
    records = [make_record(0.0, 0.0, [1.0], receipt=receipt) for receipt in receipts]
    records.append(make_record(0.0, 0.0, [1.0]))
    found = summarise(records).receipts
    assert found is not None
    assert (found.receipts, found.transferred) == (3, 2)
    assert found.phases["prefill_s"].p50 == 0.25
    assert "exposed_transfer_s" not in found.phases
    assert found.totals == {"transfer_bytes": 3000, "transfer_blocks": 3, "cached_tokens": 48}
    assert found.prefill_workers == {"p0": 3}
    assert found.decode_workers == {"d0": 2, "d1": 1}
    assert found.first_token_sources == {"prefill": 3}
    assert found.fallbacks == {"local_prefill": 1}
    assert summarise(records[-1:]).receipts is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpy_s(sample: list[float], percent: float) -> None:
    expected = float(np.percentile(sample, percent))
    assert percentile(sorted(sample), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    found = distribution(sample)
    assert found is not None
    assert found.mean == pytest.approx(float(np.mean(sample)), rel=1e-9, abs=1e-6)


def test_a_percentile_next_to_infinity_is_infinite() -> None:
    assert percentile([1.0, math.inf], 0) == 1.0
    assert percentile([1.0, math.inf], 1) == math.inf
    assert percentile([math.inf, math.inf], 50) == math.inf
