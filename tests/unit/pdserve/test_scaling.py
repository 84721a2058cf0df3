"""How many workers a load asks for: the decision alone, on a clock that moves by itself."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import ScalingConfig, load_config
from pdserve.deploy.scaling.scaler import Bounds, Scaler
from pdserve.errors import ConfigError
from pdserve.types import Role

RULES = ScalingConfig(target_load=0.7, up_after_s=10.0, down_after_s=60.0)
DECODE = Role.DECODE


def counts(needs: list[float], *, least: int = 1, most: int = 16) -> list[int]:
    """Return the wanted workers at each second."""
    scaler = Scaler({DECODE: Bounds(least, most)}, RULES, {DECODE: least})
    return [scaler.decide({DECODE: need}, float(now))[DECODE] for now, need in enumerate(needs)]


@given(st.lists(st.floats(0, 1e6), max_size=300), st.integers(1, 5), st.integers(0, 9))
def test_counts_stay_in_their_bounds_and_move_by_steps(
    needs: list[float], least: int, more: int
) -> None:
    found = counts(needs, least=least, most=least + more)
    assert all(least <= count <= least + more for count in found)
    assert all(before - 1 <= after <= 2 * before for before, after in pairwise([least, *found]))


@given(st.floats(0, 20), st.integers(1, 5))
def test_a_constant_load_never_turns_the_count_around(need: float, least: int) -> None:
    found = counts([need] * 200, least=least)
    assert found == sorted(found)
    assert found[-1] == min(16, max(least, math.ceil(need / 0.7 - 1e-9)))


def test_a_load_that_comes_and_goes_counts_by_its_average() -> None:
    assert set(counts([1.2, 0.0] * 100)) == {1}
    assert set(counts([0.5] * 20 + [2.0] + [0.5] * 100)) == {1}
    found = counts([3.0] * 60 + [0.1] * 9 + [3.0] * 200)
    assert set(found[60:]) == {5}


def test_workers_are_added_at_once_and_removed_one_by_one() -> None:
    found = counts([5.0] * 60 + [0.0] * 500)
    assert list(dict.fromkeys(found[:60])) == [1, 2, 4, 8]
    assert list(dict.fromkeys(found[60:])) == [8, 7, 6, 5, 4, 3, 2, 1]


def test_a_role_of_unknown_load_keeps_its_workers() -> None:
    bounds = {Role.PREFILL: Bounds(1, 4), DECODE: Bounds(2, 4)}
    scaler = Scaler(bounds, RULES, {Role.PREFILL: 1, DECODE: 2})
    for now in range(30):
        found = scaler.decide({Role.PREFILL: 2.0}, float(now))
    assert found == {Role.PREFILL: 3, DECODE: 2}


@pytest.mark.parametrize(("present", "first"), [(0, 2), (3, 3), (9, 4)])
def test_it_continues_from_the_current_workers(present: int, first: int) -> None:
    scaler = Scaler({DECODE: Bounds(2, 4)}, RULES, {DECODE: present})
    assert scaler.decide({}, 0.0) == {DECODE: first}


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 1)])
def test_bounds_that_cannot_be_kept_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="least"):
        Bounds(least, most)


def test_a_target_load_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"up\.scaling\.target_load"):
        load_config(None, {"up.scaling.target_load": 0.0})


def test_a_model_without_requests_goes_to_zero_and_the_first_one_brings_it_back() -> None:
    rules = ScalingConfig(up_after_s=10.0, down_after_s=60.0, to_zero_after_s=30.0)
    bounds = {Role.PREFILL: Bounds(1, 4), DECODE: Bounds(2, 4)}
    scaler = Scaler(bounds, rules, {Role.PREFILL: 1, DECODE: 2})

    def after(load: float | None, times: range) -> list[tuple[int, ...]]:
        needs = {} if load is None else {Role.PREFILL: 0.0, DECODE: load}
        return [tuple(scaler.decide(needs, float(now)).values()) for now in times]

    assert set(after(0.01, range(100))) == {(1, 2)}
    assert set(after(0.0, range(100, 129))) == {(1, 2)}
    assert set(after(0.0, range(129, 200))) == {(0, 0)}
    assert set(after(None, range(200, 210))) == {(0, 0)}, "a router that knows nothing asks nothing"
    assert set(after(0.01, range(210, 211))) == {(1, 2)}
    assert set(after(None, range(211, 300))) == {(1, 2)}, "an unknown load is not none"
    again = Scaler(bounds, rules, {Role.PREFILL: 0, DECODE: 0})
    assert again.decide({DECODE: 0.0}, 0.0) == {Role.PREFILL: 0, DECODE: 0}
