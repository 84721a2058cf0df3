"""Cutting a trace, due times, and prompts that share what the trace says."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.traces import (
    PromptMaker,
    Shape,
    Trace,
    TraceMeta,
    TraceRequest,
    due_times_s,
    load_trace,
    shape_workload,
    speedup_for,
)


def trace(*rows: tuple[int, int], block_size: int | None = None) -> Trace:
    requests = tuple(TraceRequest(float(i), x, y) for i, (x, y) in enumerate(rows))
    return Trace(TraceMeta(name="t", format="azure", block_size=block_size), requests)


def test_lengths_are_scaled_then_cut_then_dropped_then_limited() -> None:
    shape = Shape(scale_lengths=Fraction(1, 2), max_output_tokens=20, max_total_tokens=60, limit=2)
    workload = shape_workload(trace((80, 100), (90, 10), (20, 30), (2, 1)), shape)
    sent = [(number, x.input_tokens, x.output_tokens) for number, x in workload.rows]
    assert sent == [(0, 40, 20), (1, 45, 5)]
    assert (workload.cut.capped, workload.cut.dropped) == (1, 0)
    with pytest.raises(BenchError, match="raise --max-total-tokens"):
        shape_workload(trace((80, 100)), Shape(max_total_tokens=10))


def test_skipping_wraps_to_the_start_so_that_the_limit_is_kept() -> None:
    rows = trace(*((i + 1, 1) for i in range(10)))
    for skip in range(25):
        assert len(shape_workload(rows, Shape(skip=skip, limit=4)).rows) == 4


@given(st.sampled_from([1, 2, 8, 64, 512]))
@settings(max_examples=5, deadline=None)
def test_scaled_rows_keep_their_number_of_prefix_blocks(part: int) -> None:
    whole = load_trace("longchat")
    workload = shape_workload(whole, Shape(scale_lengths=Fraction(1, part), limit=300))
    assert workload.cut.block_size == 512 // part
    for _, row in workload.rows:
        assert -(-row.input_tokens // (512 // part)) == len(row.hash_ids or ())


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40),
    st.integers(0, 3),
)
def test_spreading_a_tick_keeps_the_order_and_the_tick(ticks: list[int], seed: int) -> None:
    arrivals = [3.0 * tick for tick in sorted(ticks)]
    due = due_times_s(arrivals, tick_s=3.0, seed=seed)
    assert due == sorted(due)
    assert due == due_times_s(arrivals, tick_s=3.0, seed=seed)
    for at_s, due_s in zip(arrivals, due, strict=True):
        assert 0 <= due_s - (at_s - arrivals[0]) < 3.0


def test_the_speedup_gives_the_rate() -> None:
    due = [0.0, 1.0, 5.0, 9.0]
    assert speedup_for(due, 3.0) == pytest.approx(9.0)
    with pytest.raises(BenchError, match="two requests at different times"):
        speedup_for([1.0, 1.0], 2.0)


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    maker = PromptMaker("d", 0, 2048, 8)
    paths = {(1, 2, 3): 20, (1, 2, 4): 24, (1, 5): 11, (2, 3): 16}
    prompts = [maker.tokens("x", TraceRequest(0.0, n, 1, path)) for path, n in paths.items()]
    assert [len(prompt) for prompt in prompts] == list(paths.values())
    first, *others = prompts
    for other, agree in zip(others, (16, 8, 0), strict=True):
        assert other[:agree] == first[:agree]
        assert other[agree : agree + 4] != first[agree : agree + 4]
    assert all(256 <= token < 2048 - 256 for prompt in prompts for token in prompt)
    alone = [maker.tokens(name, TraceRequest(0.0, 9, 1)) for name in ("x", "y", "x")]
    assert alone[0] == alone[2] != alone[1]
    assert PromptMaker("d", 1, 2048, 8).tokens("x", TraceRequest(0.0, 9, 1)) != alone[0]
