"""Intervals with answers that are known, or can be counted."""

from __future__ import annotations

import math
from itertools import product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bootstrap import Estimate, estimate, ratio
from benchmarks.stats import percentile


def test_rounds_that_agree_leave_no_doubt() -> None:
    assert estimate([2.5] * 5, "x") == Estimate(2.5, 2.5, 2.5)
    assert ratio([(1.0, 4.0), (2.0, 8.0), (3.0, 12.0)], "x") == Estimate(0.25, 0.25, 0.25)


def test_two_rounds_have_no_interval_and_none_has_nothing() -> None:
    assert estimate([1.0, 2.0], "x") == Estimate(1.5)
    assert estimate([], "x") is None


def test_the_interval_is_that_of_all_resamples() -> None:
    rounds = [1.0, 2.0, 4.0, 8.0, 16.0]
    every = sorted(median(drawn) for drawn in product(rounds, repeat=5))
    found = estimate(rounds, "x")
    assert found == Estimate(4.0, percentile(every, 2.5), percentile(every, 97.5))
    assert (found.low, found.high) == (1.0, 16.0)


def test_an_interval_is_drawn_alike_each_time() -> None:
    rounds = [float(x * x % 17) for x in range(9)]
    assert estimate(rounds, "a") == estimate(rounds, "a")


@settings(deadline=None)  # a busy machine
@given(st.lists(st.floats(0.001, 1000), min_size=3, max_size=9))
def test_an_interval_holds_its_median(rounds: list[float]) -> None:
    found = estimate(rounds, "x")
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert min(rounds) <= found.low <= found.value <= found.high <= max(rounds)


def test_failures_that_reach_the_median_make_it_infinite() -> None:
    found = estimate([1.0, math.inf, math.inf], "x")
    assert found is not None
    assert found.value == math.inf
    mixed = estimate([1.0, 1.0, 1.0, 1.0, math.inf], "x")
    assert mixed is not None
    assert mixed.value == 1.0


@pytest.mark.parametrize("pair", [(1.0, 0.0), (math.inf, 1.0), (1.0, math.inf)])
def test_a_quotient_that_says_nothing_is_left_out(pair: tuple[float, float]) -> None:
    assert ratio([(1.0, 1.0), pair, (1.0, 1.0)], "x") is None


def test_a_ratio_is_of_rounds_not_of_medians() -> None:
    # The machine got ten times slower and faster: every round still says a half.
    rounds = [(1.0, 2.0), (10.0, 20.0), (0.1, 0.2), (5.0, 10.0)]
    found = ratio(rounds, "x")
    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.high == pytest.approx(0.5)
