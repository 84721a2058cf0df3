"""Breakers, ejected pairs, stalled workers, and the clock that pauses with the router."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pdserve.types import Role, WorkerLoad
from router.fleet.health import (
    TICK_S,
    Breaker,
    BreakerLimits,
    BreakerState,
    EjectedPair,
    OutlierEjection,
    PausingClock,
    StallDetector,
)
from router.fleet.member import Member
from router.fleet.pool import WorkerPool
from router.fleet.registry import TICKS_PER_CHECK
from router.health_checks import half_open_pair, unused_pair
from tests.fakes import worker_info

CLOSED, OPEN, HALF_OPEN = BreakerState
LIMITS = BreakerLimits(failures=3, open_s=10.0, max_open_s=30.0)
SECONDS = 60.0
PAIR, OTHER = ("p1", "d1"), ("p2", "d1")
P, D = Role.PREFILL, Role.DECODE


class TestBreaker:
    @pytest.fixture
    def opened(self) -> Breaker:
        """Open since 0, for 10 s."""
        breaker = Breaker(LIMITS)
        assert breaker.trip(0.0, "it hangs")
        return breaker

    def test_failures_in_a_row_open_it(self) -> None:
        breaker = Breaker(LIMITS)
        assert [breaker.failure(0.0, "x"), breaker.failure(0.0, "x")] == [False, False]
        breaker.success()
        assert [breaker.failure(1.0, "x"), breaker.failure(1.0, "x")] == [False, False]
        assert breaker.state(1.0) is CLOSED
        assert breaker.failure(1.0, "it fails")
        assert (breaker.state(1.0), breaker.reason) == (OPEN, "it fails")

    def test_one_request_tries_it_and_closes_it(self, opened: Breaker) -> None:
        assert (opened.state(9.9), opened.remaining_s(4.0)) == (OPEN, 6.0)
        assert not opened.try_once(9.9)
        assert opened.state(10.0) is HALF_OPEN
        assert opened.try_once(10.0)
        assert opened.state(10.0) is OPEN
        assert not opened.try_once(10.0)
        assert opened.success()
        assert opened.state(10.0) is CLOSED

    def test_a_failed_trial_keeps_it_open_for_longer_up_to_a_limit(self, opened: Breaker) -> None:
        now, waits = 0.0, []
        for _ in range(3):
            now += opened.remaining_s(now)
            assert opened.try_once(now)
            assert opened.failure(now, "again")
            waits.append(opened.remaining_s(now))
        assert waits == [20.0, 30.0, 30.0]

    def test_a_trial_without_a_result_is_followed_by_another(self, opened: Breaker) -> None:
        assert opened.try_once(10.0)
        assert (opened.state(19.9), opened.state(20.0)) == (OPEN, HALF_OPEN)
        assert opened.try_once(20.0)

    def test_what_began_before_it_opened_changes_nothing(self, opened: Breaker) -> None:
        assert not opened.success()
        assert not opened.failure(5.0, "so did this")
        assert (opened.state(5.0), opened.remaining_s(5.0)) == (OPEN, 5.0)

    def test_zero_seconds_disable_it(self) -> None:
        breaker = Breaker(BreakerLimits(1, 0.0, 0.0))
        assert not breaker.failure(0.0, "x")
        assert breaker.state(0.0) is CLOSED


class TestOutlierEjection:
    @pytest.fixture
    def outliers(self) -> OutlierEjection:
        """PAIR is ejected at 0."""
        outliers = OutlierEjection(SECONDS)
        outliers.corrupted(PAIR, 0.0)
        return outliers

    def test_damaged_kv_ejects_a_pair_for_a_time(self, outliers: OutlierEjection) -> None:
        assert outliers.ejected(0.0) == outliers.ejected(SECONDS - 1) == {PAIR}
        assert outliers.ejected(SECONDS) == frozenset()
        assert outliers.listed(20.0) == [EjectedPair(*PAIR, SECONDS - 20.0, 1)]

    def test_failed_transfers_in_a_row_eject_a_pair(self, outliers: OutlierEjection) -> None:
        assert [outliers.failed(OTHER, 1.0, "x") for _ in range(2)] == [False, False]
        outliers.succeeded(OTHER, 1.0)
        assert [outliers.failed(OTHER, 1.0, "x") for _ in range(3)] == [False, False, True]
        assert outliers.ejected(1.0) == {PAIR, OTHER}

    def test_one_request_tries_a_half_open_pair(self, outliers: OutlierEjection) -> None:
        assert outliers.try_once(PAIR, SECONDS)
        assert outliers.ejected(SECONDS) == {PAIR}
        assert not outliers.try_once(PAIR, SECONDS)
        outliers.succeeded(PAIR, SECONDS)
        assert outliers.ejected(SECONDS) == {PAIR}, "that request was placed before"
        outliers.succeeded(PAIR, SECONDS, is_trial=True)
        assert outliers.listed(SECONDS) == []

    def test_a_failed_trial_ejects_it_again(self, outliers: OutlierEjection) -> None:
        assert outliers.try_once(PAIR, SECONDS)
        outliers.corrupted(PAIR, SECONDS + 5)
        assert outliers.listed(SECONDS + 5) == [EjectedPair(*PAIR, SECONDS, 2)]

    def test_a_pair_that_nobody_tries_is_forgotten(self, outliers: OutlierEjection) -> None:
        assert outliers.listed(2 * SECONDS - 1) == [EjectedPair(*PAIR, 0.0, 1)]
        assert outliers.listed(2 * SECONDS) == []

    def test_with_probes_no_request_tries(self, outliers: OutlierEjection) -> None:
        outliers.by_probe = True
        assert outliers.ejected(SECONDS) == {PAIR}

    def test_zero_seconds_disable_it(self) -> None:
        outliers = OutlierEjection(0.0)
        outliers.corrupted(PAIR, 0.0)
        assert outliers.listed(0.0) == []

    def test_a_half_open_pair_is_probed_when_both_are_ready(
        self, outliers: OutlierEjection
    ) -> None:
        p, d = ready("p1", P), ready("d1", D)
        members = {"p1": p, "d1": d}
        assert half_open_pair(members, outliers, SECONDS - 1) is None
        assert half_open_pair(members, outliers, SECONDS) == (p, d)
        d.draining = True
        assert half_open_pair(members, outliers, SECONDS) is None
        assert half_open_pair({"p1": p}, outliers, SECONDS) is None
        changed = {"p1": p, "d1": ready("d1", P)}
        assert half_open_pair(changed, outliers, SECONDS) is None

    def test_a_pair_that_was_not_used_is_probed(self) -> None:
        outliers, p, d = OutlierEjection(SECONDS), ready("p1", P), ready("d1", D)

        def found(now: float, *members: Member) -> tuple[Member, Member] | None:
            by_id = {m.worker_id: m for m in members}
            return unused_pair(by_id, outliers, now, idle_s=10.0, draw=Random(1))

        assert found(0.0, p, d, ready("a", Role.AGGREGATED)) == (p, d)
        outliers.succeeded(PAIR, 5.0)
        assert found(14.0, p, d) is None
        assert found(15.0, p, d) == (p, d)
        outliers.corrupted(PAIR, 15.0)
        assert found(30.0, p, d) is None, "it is ejected"
        assert found(30.0, p) is None
        assert d.info.kv is not None
        other = replace(d.info, kv=replace(d.info.kv, compatibility="other"))
        assert found(200.0, p, Member(other, lease_end=1.0, attached=True)) is None


def ready(worker_id: str, role: Role) -> Member:
    return Member(worker_info(worker_id, role), lease_end=1.0, attached=True)


def load(progress: int, *, has_work: bool = True, allowance_s: float = 0.0) -> WorkerLoad:
    return WorkerLoad(0, 1, 0.5, 50, progress, has_work, allowance_s)


class Watched:
    """A worker that is checked every half second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stalls = StallDetector()
        self._frames = 0

    def check(
        self, seconds: float, report: WorkerLoad | None, *, sends: bool = True, streams: int = 1
    ) -> str:
        """Return the first verdict in a time in which nothing else changes."""
        why = ""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self._frames += sends
            why = why or self._stalls.check(
                self.now, frames=self._frames, streams=streams, load=report, stall_s=2.0
            )
        return why


class TestStalls:
    def test_a_worker_that_makes_steps_is_not_stalled(self) -> None:
        watched = Watched()
        for count in range(20):
            assert watched.check(1.5, load(count)) == ""

    @pytest.mark.parametrize(
        ("report", "streams"),
        [
            pytest.param(load(5, has_work=False), 1, id="it waits for KV"),
            pytest.param(load(5), 0, id="nobody waits for it"),
            pytest.param(None, 1, id="it has never reported its load"),
        ],
    )
    def test_a_worker_without_work_is_not_stalled(
        self, report: WorkerLoad | None, streams: int
    ) -> None:
        assert Watched().check(60.0, report, streams=streams) == ""

    @pytest.mark.parametrize(
        ("allowance_s", "stalled_at_s"), [(0.0, 2.0), (2.0, 2.0), (7.5, 7.5), (60.0, 60.0)]
    )
    def test_a_worker_that_makes_no_step_is_stalled(
        self, allowance_s: float, stalled_at_s: float
    ) -> None:
        watched, report = Watched(), load(7, allowance_s=allowance_s)
        watched.check(0.5, load(6))
        assert watched.check(stalled_at_s, report) == ""
        expected = f"no engine step for {stalled_at_s:.1f} s although it has work"
        assert watched.check(0.5, report) == expected

    def test_a_silent_worker_with_streams_is_stalled(self) -> None:
        watched = Watched()
        watched.check(5.0, load(7, has_work=False))
        assert watched.check(1.5, load(7, has_work=False), sends=False) == ""
        assert watched.check(1.0, load(7, has_work=False), sends=False) == "no frame for 2.0 s"

    def test_a_silent_worker_without_streams_is_left_to_its_lease(self) -> None:
        assert Watched().check(60.0, load(7), sends=False, streams=0) == ""


class BusyRouter:
    """An event loop whose every iteration takes `turn_s`, and a worker that sends a frame every
    half second and renews its lease. Both are read some iterations later."""

    def __init__(self, turn_s: float, *, is_dead: bool = False) -> None:
        self.time = 0.0
        self.why = ""
        self._turn_s = turn_s
        self._is_dead = is_dead
        self._clock = PausingClock(lambda: self.time)
        self._stalls = StallDetector()
        self._pool = WorkerPool(lease_s=5.0)
        self._pool.register(worker_info("d", D), self._clock.now())
        self._frames = self._ticks = 0
        self._tick_due = TICK_S

    def run(self, seconds: float) -> None:
        frame_at, renewal_at = self._arrival(0.5, 4), self._arrival(1.7, 8)
        while self.time < seconds and not self.why:
            self.time += self._turn_s
            if not self._is_dead and self.time >= frame_at:
                self._frames += 1
                frame_at = self._arrival(0.5, 4)
            if not self._is_dead and self.time >= renewal_at:
                self._pool.renew("d", "e1", self._clock.now(), load=None, draining=False)
                renewal_at = self._arrival(1.7, 8)
            if self.time >= self._tick_due:
                self._tick()

    def _arrival(self, sent_in_s: float, turns: int) -> float:
        return self.time + sent_in_s + turns * self._turn_s

    def _tick(self) -> None:
        self._clock.tick()
        self._tick_due = self.time + TICK_S
        self._ticks += 1
        if self._ticks % TICKS_PER_CHECK:
            return
        now, frames = self._clock.now(), self._frames
        self.why = self._stalls.check(now, frames=frames, streams=1, load=load(frames), stall_s=2.0)
        if self._pool.expire(now):
            self.why = "its lease expired"


class TestPausingClock:
    @pytest.mark.parametrize("turn_s", [0.001, 0.15, 0.3, 0.55, 1.0, 60.0])
    def test_a_busy_router_loses_no_healthy_worker(self, turn_s: float) -> None:
        router = BusyRouter(turn_s)
        router.run(60.0 * max(1.0, turn_s))
        assert router.why == ""

    @pytest.mark.parametrize(("turn_s", "within_s"), [(0.001, 3.0), (0.3, 60.0), (1.0, 60.0)])
    def test_a_silent_worker_is_found_however_busy_the_router(
        self, turn_s: float, within_s: float
    ) -> None:
        router = BusyRouter(turn_s, is_dead=True)
        router.run(60.0)
        assert router.why.startswith("no frame")
        assert router.time < within_s

    def test_it_never_goes_back_and_counts_no_long_pause(self) -> None:
        now = 100.0
        clock = PausingClock(lambda: now)
        seen = [clock.now()]
        for pause in (0.1, 0.1, 3600.0, 0.1):
            now += pause / 2
            seen.append(clock.now())
            now += pause / 2
            clock.tick()
            seen.append(clock.now())
        assert seen == sorted(seen)
        assert seen[-1] - seen[0] < 0.5
