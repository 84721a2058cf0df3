"""How many workers should prefill and how many decode, on a clock that advances by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import RolesConfig
from pdserve.observe.step_costs import StepMoments, StepRecorder, StepShape
from pdserve.types import EngineLimits, Role, WorkerLoad
from router.control.autoscaler import (
    COOLDOWN,
    MIN_IMPROVEMENT,
    MIN_LOAD,
    Loads,
    RoleState,
    loads_of,
    spare_for,
)
from router.placement.cost import RequestMeans, StepModel, fit_steps
from tests.support.placement import worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.fleet.member import Member

CONFIG = RolesConfig(auto=True)
Need = tuple[float, float]


@dataclass
class Service:
    """Workers that change their role at once. The load is given in workers."""

    prefill: int
    decode: int
    now: float = 0.0
    noise: float = 0.0
    seed: int = 0
    changes_fail: bool = False

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.changes: list[tuple[float, Role]] = []
        self.state: RoleState | None = None
        self.text = ""

    def loads(self, need: Need) -> Loads:
        """Return the measurements of a worker."""
        noisy = (x * (1 + self.noise * self._draw.uniform(-1, 1)) for x in need)
        return Loads(self.prefill, self.decode, *noisy)

    def run(self, seconds: float, need: Callable[[float], Need]) -> list[str]:
        stances: list[str] = []
        end = self.now + seconds
        while self.now < end:
            loads = self.loads(need(self.now))
            self.state = self.state or RoleState(loads, self.now, self.now)
            verdict = self.state.decide(loads, self.now, CONFIG)
            self.now += 1.0
            stances.append(verdict.stance)
            self.text = verdict.text
            if verdict.role is None:
                continue
            self.changes.append((self.now, verdict.role))
            failure = "the probe failed" if self.changes_fail else ""
            if not failure:
                more = 1 if verdict.role is Role.PREFILL else -1
                self.prefill, self.decode = self.prefill + more, self.decode - more
            assert self.prefill >= 1
            assert self.decode >= 1
            self.state.moved("w", failure, self.now, CONFIG)
        return stances


def constant(prefill: float, decode: float) -> Callable[[float], Need]:
    return lambda _: (prefill, decode)


@settings(max_examples=15, deadline=None)
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
    assert len({role for _, role in service.changes}) <= 1
    assert len(service.changes) <= workers - 2
    # What is left to gain is less than what is asked, give or take what noise can hide.
    loads = Loads(service.prefill, service.decode, *need)
    enough = loads.highest * (1 - MIN_IMPROVEMENT - 0.1)
    assert loads.highest <= MIN_LOAD * 1.1 or loads.best().highest >= enough
    begun = len(service.changes)
    service.run(300.0, constant(*need))
    assert len(service.changes) <= begun + 1


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


def test_each_change_waits_for_the_cooldown_and_until_the_need_lasted() -> None:
    service = Service(1, 5)
    service.run(400.0, constant(4.0, 0.5))
    times = [when for when, _ in service.changes]
    assert times[0] >= COOLDOWN * CONFIG.window_s
    assert min(b - a for a, b in pairwise(times)) >= COOLDOWN * CONFIG.window_s
    calm = Service(2, 2)
    assert set(calm.run(100.0, constant(0.5, 0.5))) == {"balanced"}
    stances = calm.run(80.0, constant(3.0, 0.5))
    assert CONFIG.window_s - 1 <= stances.count("waiting")
    assert len(calm.changes) == 1


def test_changes_of_other_routers_start_a_cooldown() -> None:
    service = Service(2, 3)
    service.run(100.0, constant(0.1, 0.1))
    service.prefill, service.decode = 1, 4
    assert set(service.run(59.0, constant(3.0, 0.5))) == {"waiting"}
    assert "workers have changed" in service.text
    assert "move" in service.run(10.0, constant(3.0, 0.5))


def test_a_failed_change_is_tried_again_later_and_later() -> None:
    service = Service(2, 2, changes_fail=True)
    service.run(1000.0, constant(3.0, 0.5))
    times = [when for when, _ in service.changes]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == [61.0, 121.0, 241.0, 481.0]
    assert "the probe failed" in service.text
    service.changes_fail = False
    service.run(1000.0, constant(3.0, 0.5))
    assert (service.prefill, service.decode) == (3, 1)
    assert service.state is not None
    assert not service.state.failed


@pytest.mark.parametrize("need", [(0.0, 0.0), (0.0, 2.0), (2.0, 0.0)])
def test_a_role_without_a_worker_gets_one(need: Need) -> None:
    service = Service(0, 3)
    service.prefill = 0
    service.run(200.0, constant(*need))
    assert (service.prefill, service.decode) in {(1, 2), (2, 1)}
    assert service.prefill == (2 if need[0] else 1)


BLOCKS = 1000
MEANS = RequestMeans()
for _ in range(5):
    MEANS.prompt_tokens.add(100.0)
    MEANS.prefill_s.add(2.0)
    MEANS.decode_s.add(5.0)
    MEANS.gaps.add(10.0)


def member(name: str, load: WorkerLoad | None = None, **state: Any) -> Member:
    found = worker(name, load, blocks=BLOCKS, **state)
    found.info = replace(found.info, limits=EngineLimits(10))
    return found


def decoding(running: int, *, waiting: int = 0, free: int = BLOCKS) -> WorkerLoad:
    return WorkerLoad(waiting, running, 1.0 - free / BLOCKS, free)


def loads(
    *members: Member,
    queued: int = 0,
    means: RequestMeans | None = MEANS,
    model: StepModel | None = None,
) -> Loads:
    return loads_of(members, queued=queued, means=means, step_model=lambda _: model, tpot_s=0.1)


def test_workers_that_are_not_ready_or_do_both_phases_count_neither_way() -> None:
    gone = member("p1", outstanding_tokens=100, draining=True)
    away = member("d1", attached=False)
    assert loads(member("p0"), member("d0"), gone, away, member("a")) == Loads(1, 1, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "means", "need"),
    [
        (0, MEANS, 1.0),
        (80, MEANS, 2.0),
        # Three prompts of two seconds wait behind the one at work.
        (400, MEANS, 2.0 + 3 * 2.0 / 10.0),
        (400, None, 2.0),
    ],
)
def test_prefill_is_busy_with_prompts_of_whichever_router(
    tokens: int, means: RequestMeans | None, need: float
) -> None:
    members = member("p0", outstanding_tokens=tokens), member("p1", decoding(1))
    assert loads(*members, means=means).prefill_need == pytest.approx(need)


@pytest.mark.parametrize(
    ("load", "state", "need"),
    [
        (decoding(4), {}, 0.4),
        (decoding(4), {"reserved_blocks": 500, "foreign_blocks": 100}, 0.6),
        # As many wait for their prefill: their blocks are not decode's load.
        (decoding(4, waiting=4), {"reserved_blocks": 500, "foreign_blocks": 100}, 0.4),
        (decoding(0, waiting=8), {"reserved_blocks": 500}, 0.0),
        (None, {"reserved_blocks": 500, "foreign_blocks": 100, "outstanding_requests": 3}, 0.6),
    ],
)
def test_decode_is_as_loaded_as_what_is_scarcest(
    load: WorkerLoad | None, state: dict[str, int], need: float
) -> None:
    assert loads(member("d0", load, **state)).decode_need == pytest.approx(need)


def test_decode_is_loaded_by_the_time_that_a_token_takes() -> None:
    recorder = StepRecorder()
    for reqs in range(1, 20):
        # 20 ms, and 20 more for each: four requests leave nothing of 100 ms.
        recorder.observe(StepShape(decode_reqs=reqs), 0.02 + 0.02 * reqs, 0.0)
    known = fit_steps(recorder.moments(0.0), StepMoments())
    unknown = fit_steps(StepMoments(), StepMoments())
    for running, model, need in ((3, known, 0.75), (6, known, 1.5), (6, unknown, 0.6)):
        found = loads(member("d0", decoding(running)), model=model)
        assert found.decode_need == pytest.approx(need, rel=0.05)


def test_queued_requests_count_for_both_phases() -> None:
    busy, idle = (loads(member("p"), member("d", decoding(n)), queued=20) for n in (5, 0))
    assert busy.prefill_need == idle.prefill_need == pytest.approx(20 * 2.0 / 10.0)
    assert busy.decode_need == pytest.approx(0.5 + 20 * 0.1 * 5.0 / 10.0)
    assert idle.decode_need == pytest.approx(20 * 0.1 * 5.0 / 10.0)
    unknown = loads(member("p"), member("d", decoding(0)), queued=20, means=None)
    assert unknown == Loads(1, 1, 0.0, 0.0)


def test_the_worker_with_the_least_work_is_moved() -> None:
    busy, calm = member("d0", decoding(5)), member("d1", decoding(1))
    members = [member("p0"), busy, calm, member("d2", decoding(0), draining=True)]
    for failed, expected in (((), calm), (("d1",), busy), (("d0", "d1"), calm)):
        assert spare_for(members, Role.PREFILL, failed) is expected
    # A rank of a data-parallel group stays.
    calm.info = replace(calm.info, group="d0")
    assert spare_for(members, Role.PREFILL, ()) is busy
    # The only one of its role stays.
    assert spare_for(members, Role.DECODE, ()) is None
