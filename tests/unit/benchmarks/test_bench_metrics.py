"""Figures, computed exactly from timelines written by hand."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from benchmarks.metrics import PER_REQUEST, summarise
from benchmarks.progress import Progress
from benchmarks.stats import WARMUP, alternate, estimate, ratio
from tests.support.benchmark_results import failed, receipt, record


def test_the_latencies_of_one_request() -> None:
    one = record(scheduled_s=1.0, sent_s=1.25, chunk_s=(2.0, 2.5, 2.625), chunk_tokens=(1, 1, 1))
    found = {name: metric(one) for name, metric in PER_REQUEST.items()}
    assert found == {"ttft": 0.75, "tpot": 0.3125, "tt2t": 0.5, "e2e": 1.375}


def test_an_answer_of_one_token_meets_a_limit_on_later_ones() -> None:
    one = record(chunk_s=(0.5,), chunk_tokens=(1,), output_tokens=1, completion_tokens=1)
    summary = summarise([one], {"tpot": 0.001, "ttft": 1.0})
    assert summary.latency["tpot"] is None
    assert summary.itl is None
    assert summary.slo is not None
    assert summary.slo.attainment == 1.0


@pytest.mark.parametrize(
    ("chunk_tokens", "tt2t", "caution"),
    [
        ((1, 1, 1), 0.05, None),
        ((2, 1, 1), 0.0, "1 requests had chunks of several tokens"),
        (None, None, "chunks of 1 requests do not report their number of tokens"),
    ],
)
def test_gaps_between_chunks_count_as_gaps_between_tokens_only_if_they_are(
    chunk_tokens: tuple[int, ...] | None, tt2t: float | None, caution: str | None
) -> None:
    summary = summarise([record(chunk_tokens=chunk_tokens)])
    found = summary.latency["tt2t"]
    assert (None if found is None else found.p50) == (tt2t and pytest.approx(tt2t))
    assert summary.itl_caution == caution


def test_a_failed_request_is_infinitely_slow_and_misses_every_limit() -> None:
    summary = summarise([record(0), record(1), failed(2)], {"ttft": 0.25})
    assert (summary.ok, summary.failed) == (2, 1)
    found = summary.latency["ttft"]
    assert found is not None
    assert (found.p50, found.p99) == (pytest.approx(0.1), math.inf)
    assert summary.slo is not None
    assert summary.slo.attainment == pytest.approx(2 / 3)
    assert summary.slo.goodput_per_s == pytest.approx(2 / summary.window_s)
    assert summary.errors == {"HTTP 429: full": 1}


def test_a_late_client_degrades_the_run() -> None:
    late = [record(i, sent_s=i + 0.2, ttft_s=0.1) for i in range(4)]
    assert "lag p99 200 ms" in (summarise(late).degraded or "")
    slow = [record(i, sent_s=i + 0.06, ttft_s=2.0) for i in range(4)]
    assert summarise(slow).degraded is None


def test_receipts_are_summed_up() -> None:
    moved = [record(i, receipt=receipt(moved=4096) | {"fallbacks": ["retry"]}) for i in range(3)]
    found = summarise([*moved, record(3)]).receipts
    assert found is not None
    assert (found.receipts, found.transferred) == (4, 3)
    assert found.totals["transfer_bytes"] == 3 * 4096
    assert found.counts["fallbacks"] == {"retry": 3}
    assert found.counts["prefill_worker"] == {"prefill-0": 4}
    assert found.phases["prefill_s"].p50 == pytest.approx(0.08)


def test_an_estimate_has_an_interval_from_three_rounds_on() -> None:
    two = estimate([1.0, 2.0], "k")
    assert (two.value, two.low) == (1.5, None)
    found = estimate([1.0, 2.0, 3.0, 4.0, 10.0], "k")
    assert found == estimate([1.0, 2.0, 3.0, 4.0, 10.0], "k")
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value == 3.0 < found.high


def test_a_ratio_is_of_rounds_side_by_side() -> None:
    # The machine slowed down tenfold; the ratio of each round did not change.
    found = ratio([(2.0, 1.0), (20.0, 10.0), (4.0, 2.0)], "k")
    assert found is not None
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    assert ratio([(1.0, 0.0)], "k") is None
    assert ratio([(math.inf, 1.0)], "k") is None


async def test_rounds_alternate_after_a_warm_up_that_does_not_count() -> None:
    calls: list[tuple[str, int]] = []

    async def measure(name: str, number: int) -> int:
        calls.append((name, number))
        return number

    found = [x async for x in alternate(["a", "b"], 3, measure, first=1)]
    assert calls[:2] == [("a", WARMUP), ("b", WARMUP)]
    assert calls[2:] == [("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == [{"a": n, "b": n} for n in (1, 2)]


def test_progress_is_a_line_every_ten_seconds_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False)) as progress:
        progress.step("round 1")
        progress.requests(100)
        for _ in range(98):
            progress.ended(is_ok=True)
        assert out.getvalue() == ""
        progress._next_s = 0.0
        progress.ended(is_ok=False)
        progress.ended(is_ok=True)
    assert out.getvalue() == "round 1: 99 of 100 requests ended, 1 failed\n"


def test_sessions_have_their_times_and_their_tokens_that_were_computed_again() -> None:
    turns = [
        record(i, session="s", turn=i + 1, kept_tokens=kept, cached_tokens=cached, sent_s=10.0 * i)
        for i, (kept, cached) in enumerate(((0, 0), (103, 96), (113, 64)))
    ]
    found = summarise([record(9), *turns]).sessions
    assert found is not None
    assert (found.sessions, found.turns, list(found.ttft)) == (1, 3, ["1", "2", "3-4"])
    assert found.time is not None
    assert found.waited is not None
    assert (found.time.max, found.waited.max) == pytest.approx((20.2, 0.6))
    assert found.recomputed_tokens == 7 + 49
    assert found.hit_rate == pytest.approx(160 / 330)
    assert summarise([record(1)]).sessions is None
