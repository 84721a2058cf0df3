"""Cutting a trace, due times, and prompts that share what the trace says."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.traces import Trace, TraceMeta, TraceRequest, due_times_s, load_trace, speedup_for
from benchmarks.workload import PromptMaker, Shape, shape_workload


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


def shared(one: object, other: object) -> int:
    assert isinstance(one, list | tuple)
    assert isinstance(other, list | tuple)
    pairs = itertools.takewhile(lambda x: x[0] == x[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[TraceRequest]]:
    block_size = draw(st.integers(1, 6))
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
    found = [
        TraceRequest(
            0.0, (len(path) - 1) * block_size + draw(st.integers(1, block_size)), 1, tuple(path)
        )
        for path in paths
    ]
    found += [TraceRequest(0.0, draw(st.integers(1, 9)), 1) for _ in range(draw(st.integers(0, 4)))]
    return block_size, draw(st.permutations(found))


@settings(deadline=None)
@given(rows(), st.integers(0, 3))
def test_two_prompts_share_exactly_the_tokens_of_their_shared_blocks(
    made: tuple[int, list[TraceRequest]], seed: int
) -> None:
    block_size, requests = made
    # A small vocabulary, so that chance alone would let some prompts agree.
    maker = PromptMaker("d", seed=seed, vocab_size=16, block_size=block_size)
    prompts = [maker.tokens(str(number), row) for number, row in enumerate(requests)]
    for prompt, row in zip(prompts, requests, strict=True):
        assert len(prompt) == row.input_tokens
        assert all(2 <= token < 14 for token in prompt)
    both = list(zip(prompts, requests, strict=True))
    for (one, row), (other, another) in itertools.combinations(both, 2):
        blocks = shared(row.hash_ids or (), another.hash_ids or ())
        assert shared(one, other) == min(blocks * block_size, len(one), len(other))
