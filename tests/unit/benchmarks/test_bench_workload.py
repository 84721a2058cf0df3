"""Shaping a trace, and the times at which its requests are due."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.schedule import TickJitter, due_times_s
from benchmarks.trace import Trace, TraceMeta, TraceRequest
from benchmarks.workload import Shape, shape_workload

ROWS = (
    TraceRequest(0.0, 100, 10),
    TraceRequest(1.0, 900, 200),
    TraceRequest(2.0, 50, 50),
    TraceRequest(3.0, 300, 30),
)
TRACE = Trace(TraceMeta(name="t"), ROWS)


def test_long_rows_are_dropped_and_said_to_be() -> None:
    workload = shape_workload(TRACE, Shape(max_total_tokens=330))
    assert [index for index, _ in workload.rows] == [0, 2, 3]
    cut = workload.cut
    assert (cut.rows, cut.requests, cut.dropped, cut.capped) == (4, 3, 1, 0)
    assert (cut.mean_input_before, cut.mean_output_before) == (337.5, 72.5)
    assert (cut.mean_input, cut.mean_output) == (150.0, 30.0)
    assert cut.notes()[0] == "dropped 1 of 4 requests that are too long"


def test_scaling_comes_before_capping_before_dropping_before_the_limit() -> None:
    shape = Shape(scale_lengths=Fraction(1, 10), max_output_tokens=5, max_total_tokens=35, limit=2)
    workload = shape_workload(TRACE, shape)
    assert workload.rows == ((0, TraceRequest(0.0, 10, 1)), (2, TraceRequest(2.0, 5, 5)))
    assert (workload.cut.capped, workload.cut.dropped) == (1, 1)


def test_no_length_is_scaled_to_nothing() -> None:
    workload = shape_workload(TRACE, Shape(scale_lengths=Fraction(1, 1000)))
    assert {(row.input_tokens, row.output_tokens) for row in workload.requests} == {(1, 1)}


def test_a_limit_that_nothing_fits_is_refused() -> None:
    with pytest.raises(BenchError, match="--max-total-tokens"):
        shape_workload(TRACE, Shape(max_total_tokens=10))


@given(
    st.integers(1, 64),
    st.lists(st.integers(1, 2000), min_size=1, max_size=8),
    st.fractions(Fraction(1, 16), Fraction(4), max_denominator=64),
)
def test_scaled_rows_have_as_many_blocks_as_ids(
    block_size: int, lengths: list[int], factor: Fraction
) -> None:
    rows = tuple(
        TraceRequest(0.0, length, 1, tuple(range(-(-length // block_size)))) for length in lengths
    )
    trace = Trace(TraceMeta(name="t", block_size=block_size), rows)
    if round(block_size * factor) < 1:
        with pytest.raises(BenchError, match="--scale-lengths"):
            shape_workload(trace, Shape(scale_lengths=factor))
        return
    workload = shape_workload(trace, Shape(scale_lengths=factor))
    assert workload.block_size is not None
    for row in workload.requests:
        assert row.hash_ids is not None
        assert -(-row.input_tokens // workload.block_size) == len(row.hash_ids)


def test_arrivals_count_from_the_first_request_and_are_sped_up() -> None:
    assert due_times_s([5.0, 6.0, 9.0], speedup=2.0) == [0.0, 0.5, 2.0]


TICKS = [0.0, 0.0, 0.0, 3.0, 3.0, 4.0, 9.0, 9.0]


def test_even_jitter_spaces_the_requests_of_a_tick() -> None:
    due = due_times_s(TICKS, tick_s=3.0, jitter="even")
    assert due == [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 9.0, 10.5]


@pytest.mark.parametrize("jitter", ["uniform", "even"])
@given(seed=st.integers(0, 99))
def test_jitter_never_reorders_nor_leaves_the_tick(jitter: TickJitter, seed: int) -> None:
    due = due_times_s(TICKS, tick_s=3.0, jitter=jitter, seed=seed)
    assert due == sorted(due)
    ends = [3.0, 3.0, 3.0, 4.0, 4.0, 7.0, 12.0, 12.0]
    assert all(tick <= at < end for tick, at, end in zip(TICKS, due, ends, strict=True))


def test_uniform_jitter_is_the_seed_s() -> None:
    def due(seed: int) -> list[float]:
        return due_times_s(TICKS, tick_s=3.0, seed=seed)

    assert due(1) == due(1) != due(2)
    assert due_times_s(TICKS, tick_s=3.0, jitter="none") == TICKS
    assert due_times_s(TICKS, tick_s=None) == TICKS


@pytest.mark.parametrize(
    ("skip", "limit", "rows"),
    [(0, 2, [0, 1]), (2, 2, [2, 3]), (3, 2, [0, 1]), (4, 2, [1, 2]), (1, None, [0, 1, 2, 3])],
)
def test_rows_are_passed_over_and_the_trace_begins_again(
    skip: int, limit: int | None, rows: list[int]
) -> None:
    workload = shape_workload(TRACE, Shape(skip=skip, limit=limit))
    assert [index for index, _ in workload.rows] == rows
