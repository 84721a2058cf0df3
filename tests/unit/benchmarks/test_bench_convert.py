"""Traces made ready for clients that neither scale nor time them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from benchmarks.convert import shape_trace
from benchmarks.errors import BenchError
from benchmarks.trace import Trace, TraceMeta, TraceRequest, load_trace, write_trace
from benchmarks.workload import Shape, shape_workload

if TYPE_CHECKING:
    from pathlib import Path

ROWS = tuple(TraceRequest(float(n), 100 * (n + 1), 20) for n in range(4))
PLAIN = Trace(TraceMeta(name="t"), ROWS)


def test_lengths_and_times_are_those_of_a_replay() -> None:
    found = shape_trace(PLAIN, Shape(scale_lengths=Fraction(1, 10), limit=3), rate_per_s=4.0)
    assert [(row.input_tokens, row.output_tokens) for row in found.requests] == [
        (10, 2),
        (20, 2),
        (30, 2),
    ]
    assert [row.arrival_s for row in found.requests] == pytest.approx([0, 0.25, 0.5])


def test_ids_are_given_that_no_two_rows_share(tmp_path: Path) -> None:
    found = shape_trace(PLAIN, Shape(scale_lengths=Fraction(1, 10)), unique_blocks=16)
    ids = [row.hash_ids or () for row in found.requests]
    assert [len(of_row) for of_row in ids] == [1, 2, 2, 3]
    assert sorted(x for of_row in ids for x in of_row) == list(range(8))
    path = tmp_path / "t.jsonl"
    write_trace(found, path)
    assert load_trace(str(path)).meta.block_size == 16


def test_ids_that_are_there_stay_and_their_block_is_scaled(tmp_path: Path) -> None:
    longchat = load_trace("longchat")
    shape = Shape(scale_lengths=Fraction(1, 32), limit=20)
    found = shape_trace(longchat, shape, unique_blocks=8)
    assert found.meta.block_size == 16
    assert [row.hash_ids for row in found.requests] == [
        row.hash_ids for row in longchat.requests[:20]
    ]
    assert list(found.requests) != shape_workload(longchat, shape).requests  # un-rounded times
    times = [row.arrival_s for row in found.requests]
    assert times == sorted(times)
    assert len(set(times)) == 20
    write_trace(found, tmp_path / "t.jsonl")
    assert load_trace(str(tmp_path / "t.jsonl")).meta.tick_s is None


def test_a_rate_needs_two_times() -> None:
    with pytest.raises(BenchError, match="two requests at different times"):
        shape_trace(PLAIN, Shape(limit=1), rate_per_s=2.0)
