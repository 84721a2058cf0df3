"""Breakers, ejected pairs, stalled workers, and the clock that pauses with the router."""

from __future__ import annotations

import pytest

from pdserve.types import Role, WorkerLoad
from router.fleet.checks import TICKS_PER_CHECK
from router.fleet.health import (
    TICK_S,
    Breaker,
    BreakerState,
    OutlierEjection,
    PausingClock,
    StallDetector,
)
from router.fleet.registry import Fleet
from tests.support.router_stack import Clock, worker_info

CLOSED, OPEN, HALF_OPEN = BreakerState
SECONDS = 60.0
PAIR, OTHER = ("p1", "d1"), ("p2", "d1")
P, D = Role.PREFILL, Role.DECODE


class TestBreaker:
    @pytest.fixture
    def opened(self) -> Breaker:
        """Open since 0, for 10 s."""
        breaker = Breaker(10.0)
        assert breaker.trip(0.0, "it hangs")
        return breaker

    def test_failures_in_a_row_open_it(self) -> None:
        breaker = Breaker(10.0)
        assert [breaker.failure(0.0, "x"), breaker.failure(0.0, "x")] == [False, False]
        breaker.success()
        assert [breaker.failure(1.0, "x"), breaker.failure(1.0, "x")] == [False, False]
        assert breaker.state(1.0) is CLOSED
        assert breaker.failure(1.0, "it fails")
        assert (breaker.state(1.0), breaker.reason) == (OPEN, "it fails")

    def test_it_stays_half_open_until_a_probe_has_passed(self, opened: Breaker) -> None:
        assert (opened.state(9.9), opened.remaining_s(4.0)) == (OPEN, 6.0)
        opened.success()
        assert opened.state(10.0) is HALF_OPEN
        opened.close()
        assert (opened.state(10.0), opened.failures) == (CLOSED, 0)

    def test_a_failed_probe_keeps_it_open_for_longer_up_to_a_limit(self, opened: Breaker) -> None:
        now, waits = 0.0, []
        for _ in range(4):
            now += opened.remaining_s(now)
            assert opened.failure(now, "again")
            waits.append(opened.remaining_s(now))
        assert waits == [20.0, 40.0, 80.0, 80.0]

    def test_a_failure_while_it_is_open_changes_the_reason_only(self, opened: Breaker) -> None:
        assert not opened.failure(5.0, "it fails")
        assert (opened.state(5.0), opened.remaining_s(5.0)) == (OPEN, 5.0)
        assert opened.reason == "it fails"

    def test_zero_seconds_disable_it(self) -> None:
        breaker = Breaker(0.0)
        assert not breaker.trip(0.0, "x")
        assert breaker.state(0.0) is CLOSED


class TestOutlierEjection:
    def test_damaged_kv_ejects_a_pair_until_a_probe_has_passed(self) -> None:
        outliers = OutlierEjection(SECONDS)
        outliers.corrupted(PAIR, 0.0, "damaged")
        outliers.succeeded(PAIR)
        assert outliers.ejected(0.0) == outliers.ejected(SECONDS) == {PAIR}
        ((pair, breaker),) = outliers.listed(20.0)
        assert (pair, breaker.remaining_s(20.0), breaker.failures) == (PAIR, SECONDS - 20.0, 1)
        assert outliers.half_open(SECONDS) == [PAIR]
        outliers.probed(PAIR)
        assert not outliers.ejected(SECONDS)

    def test_failed_transfers_in_a_row_eject_a_pair(self) -> None:
        outliers = OutlierEjection(SECONDS)
        assert [outliers.failed(OTHER, 1.0, "x") for _ in range(2)] == [False, False]
        outliers.succeeded(OTHER)
        assert [outliers.failed(OTHER, 1.0, "x") for _ in range(3)] == [False, False, True]
        assert outliers.ejected(1.0) == {OTHER}

    def test_a_pair_that_cannot_be_probed_is_forgotten(self) -> None:
        outliers = OutlierEjection(SECONDS)
        outliers.corrupted(PAIR, 0.0, "damaged")
        assert outliers.listed(2 * SECONDS)
        assert not outliers.listed(3600.0)

    def test_pairs_that_are_not_ejected_are_forgotten(self) -> None:
        """Pod names change with every rollout, so failures must be forgotten."""
        outliers = OutlierEjection(SECONDS)
        outliers.failed(PAIR, 0.0, "x")
        outliers.succeeded(PAIR)
        assert not outliers.breakers
        for i in range(100):
            outliers.failed((f"p{i}", "d1"), 600.0 * i, "x")
        assert len(outliers.breakers) == 1

    def test_zero_seconds_disable_it(self) -> None:
        outliers = OutlierEjection(0.0)
        outliers.corrupted(PAIR, 0.0, "damaged")
        assert not outliers.ejected(0.0)


def load(progress: int, *, has_work: bool = True, allowance_s: float = 0.0) -> WorkerLoad:
    return WorkerLoad(0, 1, 0.5, 50, progress, has_work, allowance_s)


class Watched:
    """Return a worker that is checked every half second."""

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


def busy_router(turn_s: float, seconds: float, *, is_dead: bool = False) -> tuple[str, float]:
    """Run an event loop whose every iteration takes `turn_s`, with a worker that sends a frame
    every half second and renews its lease. Both are read some iterations later. Return why the
    worker was given up, and when."""
    clock, stalls, why = Clock(), StallDetector(), ""
    fleet = Fleet(lease_s=5.0, clock=clock)
    fleet.register(worker_info("d", D))
    frames = ticks = 0
    frame_at, renewal_at, tick_at = 0.5 + 4 * turn_s, 1.7 + 8 * turn_s, TICK_S
    while clock.now < seconds and not why:
        clock.now += turn_s
        if not is_dead and clock.now >= frame_at:
            frames, frame_at = frames + 1, clock.now + 0.5 + 4 * turn_s
        if not is_dead and clock.now >= renewal_at:
            fleet.renew("d", "e1", load=None, draining=False)
            renewal_at = clock.now + 1.7 + 8 * turn_s
        if clock.now >= tick_at:
            fleet.lease_clock.tick()
            ticks, tick_at = ticks + 1, clock.now + TICK_S
            if ticks % TICKS_PER_CHECK == 0:
                now, report = fleet.lease_clock.now(), load(frames)
                why = stalls.check(now, frames=frames, streams=1, load=report, stall_s=2.0)
                fleet.expire()
                why = why or fleet.members["d"].gone
    return why, clock.now


class TestPausingClock:
    @pytest.mark.parametrize("turn_s", [0.001, 0.15, 0.3, 0.55, 1.0, 60.0])
    def test_a_busy_router_loses_no_healthy_worker(self, turn_s: float) -> None:
        why, _ = busy_router(turn_s, 60.0 * max(1.0, turn_s))
        assert why == ""

    @pytest.mark.parametrize(("turn_s", "within_s"), [(0.001, 3.0), (0.3, 60.0), (1.0, 60.0)])
    def test_a_silent_worker_is_found_however_busy_the_router(
        self, turn_s: float, within_s: float
    ) -> None:
        why, found_at = busy_router(turn_s, 60.0, is_dead=True)
        assert why.startswith("no frame")
        assert found_at < within_s

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
