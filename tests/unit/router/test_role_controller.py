"""How many workers should prefill and how many decode: the decision alone, on a clock that moves by
itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import RolesConfig
from pdserve.types import Role
from router.roles.controller import Loads, Stance, begin, flipped, look

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = RolesConfig(auto=True)
Need = tuple[float, float]


@dataclass
class Service:
    """Workers that change their role as soon as they are told, under a load given in workers."""

    prefill: int
    decode: int
    now: float = 0.0
    noise: float = 0.0
    seed: int = 0
    flips_fail: bool = False

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.flips: list[tuple[float, Role]] = []
        self.watch = begin(self.loads((0.0, 0.0)), self.now)
        self.text = ""

    def loads(self, need: Need) -> Loads:
        """What is measured of it."""
        noisy = (x * (1 + self.noise * self._draw.uniform(-1, 1)) for x in need)
        return Loads(self.prefill, self.decode, *noisy)

    def run(self, seconds: float, need: Callable[[float], Need]) -> list[Stance]:
        stances, end = [], self.now + seconds
        while self.now < end:
            self.now += CONFIG.interval_s
            self.watch, verdict = look(self.watch, self.loads(need(self.now)), self.now, CONFIG)
            stances.append(verdict.stance)
            self.text = verdict.text
            if verdict.role is None:
                continue
            self.flips.append((self.now, verdict.role))
            failure = "the canary failed" if self.flips_fail else ""
            if not failure:
                moved = 1 if verdict.role is Role.PREFILL else -1
                self.prefill, self.decode = self.prefill + moved, self.decode - moved
            assert self.prefill >= 1
            assert self.decode >= 1
            self.watch = flipped(self.watch, "w", failure, self.now, CONFIG)
        return stances


def constant(prefill: float, decode: float) -> Callable[[float], Need]:
    return lambda _: (prefill, decode)


@settings(max_examples=30, deadline=None)
@given(
    workers=st.integers(2, 9),
    share=st.floats(0.0, 1.0),
    load=st.floats(0.0, 2.0),
    prefill=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_a_constant_load_is_followed_once_and_left_alone(
    workers: int, share: float, load: float, prefill: int, seed: int
) -> None:
    prefill = min(prefill, workers - 1)
    service = Service(prefill, workers - prefill, noise=0.3, seed=seed)
    need = workers * load * share, workers * load * (1 - share)
    service.run(workers * 70.0 + 60.0, constant(*need))
    # No worker goes back and forth, and no more go than lie between the two splits.
    assert len({role for _, role in service.flips}) <= 1
    assert len(service.flips) <= workers - 2
    # What is left to gain is less than what is asked, give or take what noise can hide.
    loads = Loads(service.prefill, service.decode, *need)
    enough = loads.highest * (1 - CONFIG.min_improvement - 0.1)
    assert loads.highest <= CONFIG.min_load * 1.1 or loads.best().highest >= enough
    begun = len(service.flips)
    service.run(300.0, constant(*need))
    assert len(service.flips) <= begun + 1


@pytest.mark.parametrize(
    ("need", "split"),
    [((2.9, 0.5), (3, 1)), ((0.3, 2.8), (1, 3)), ((1.8, 1.9), (2, 2)), ((0.6, 0.1), (2, 2))],
)
def test_the_split_follows_a_load_that_shifts(need: Need, split: tuple[int, int]) -> None:
    service = Service(2, 2)
    service.run(300.0, constant(*need))
    assert (service.prefill, service.decode) == split
    service.run(600.0, constant(1.9, 1.9))
    assert (service.prefill, service.decode) == ((2, 2) if need[0] + need[1] > 1 else split)


def test_a_load_that_alternates_faster_than_roles_can_change_moves_none() -> None:
    service = Service(2, 2)
    service.run(3600.0, lambda now: (2.0, 1.0) if now % 20 < 10 else (1.0, 2.0))
    assert not service.flips


def test_each_flip_waits_until_the_last_has_settled_and_the_want_has_lasted() -> None:
    service = Service(1, 5)
    stances = service.run(400.0, constant(4.0, 0.5))
    times = [when for when, _ in service.flips]
    assert times[0] >= CONFIG.settle_s
    assert min(b - a for a, b in pairwise(times)) >= CONFIG.settle_s
    assert stances[:60] == [Stance.SETTLING] * 59 + [Stance.MOVE]
    calm = Service(2, 2)
    assert set(calm.run(100.0, constant(0.5, 0.5))) == {Stance.CALM}
    stances = calm.run(60.0, constant(3.0, 0.5))
    waited = stances.count(Stance.DWELLING)
    assert CONFIG.dwell_s - 1 <= waited <= CONFIG.dwell_s
    assert calm.text.startswith("3 prefill workers loaded 1.00, 1 decode worker loaded 0.50;")


def test_what_other_routers_move_is_waited_for() -> None:
    service = Service(2, 3)
    service.run(100.0, constant(0.1, 0.1))
    service.prefill, service.decode = 1, 4
    assert set(service.run(59.0, constant(3.0, 0.5))) == {Stance.SETTLING}
    assert "workers have changed" in service.text
    assert Stance.MOVE in service.run(10.0, constant(3.0, 0.5))


def test_few_of_many_workers_that_come_and_go_do_not_hold_it_up() -> None:
    service = Service(50, 50)
    service.run(61.0, constant(10.0, 10.0))
    for _ in range(60):
        service.prefill += 1 if service.prefill < 51 else -2
        service.run(1.0, constant(10.0, 90.0))
    assert service.flips


def test_a_flip_that_failed_is_tried_again_later_and_later() -> None:
    service = Service(2, 2, flips_fail=True)
    stances = service.run(1000.0, constant(3.0, 0.5))
    times = [when for when, _ in service.flips]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == [60.0, 120.0, 240.0, 480.0]
    assert stances.count(Stance.PAUSED) > 900
    assert "for the canary failed" in service.text
    service.flips_fail = False
    service.run(1000.0, constant(3.0, 0.5))
    assert (service.prefill, service.decode) == (3, 1)
    assert not service.watch.failed


@pytest.mark.parametrize("need", [(0.0, 0.0), (0.0, 2.0), (2.0, 0.0)])
def test_a_role_without_a_worker_gets_one(need: Need) -> None:
    service = Service(0, 3)
    service.prefill = 0
    service.run(200.0, constant(*need))
    assert (service.prefill, service.decode) in {(1, 2), (2, 1)}
    assert service.prefill == (2 if need[0] else 1)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_the_last_worker_of_a_role_stays(prefill: int, decode: int) -> None:
    service = Service(prefill, decode)
    service.run(300.0, constant(5.0, 0.0))
    service.run(300.0, constant(0.0, 5.0))
    assert not service.flips


@given(st.integers(0, 40), st.integers(0, 40), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_no_split_is_better_than_the_best(prefill: int, decode: int, p: float, d: float) -> None:
    loads = Loads(prefill, decode, p, d)
    best = loads.best()
    assert best.workers == loads.workers
    others = [loads.split(x).highest for x in range(1, loads.workers)]
    assert best.highest <= min(others, default=best.highest) * (1 + 1e-9)
    assert loads.highest >= best.highest


def test_a_verdict_says_why_in_words() -> None:
    service = Service(1, 3)
    service.run(10.0, constant(2.0, 0.6))
    assert service.text == (
        "1 prefill worker loaded 2.00, 3 decode workers loaded 0.20; 3 and 1 are wanted, but "
        "workers have changed: waits 50 s"
    )


def test_of_many_workers_several_move_before_the_next_pause() -> None:
    service = Service(100, 100)
    service.run(180.0, constant(30.0, 110.0))
    assert 10 <= len(service.flips) <= 30
    service.run(600.0, constant(30.0, 110.0))
    loads = Loads(service.prefill, service.decode, 30.0, 110.0)
    assert loads.best().highest >= loads.highest * (1 - CONFIG.min_improvement)
