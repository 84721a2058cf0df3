"""The breaker of a worker or a pair, and what tells that a worker does not get on."""

from __future__ import annotations

import pytest

from pdserve.types import WorkerLoad
from router.breaker import Breaker, BreakerLimits, BreakerState
from router.progress import ProgressWatch

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
LIMITS = BreakerLimits(failures=3, open_s=10.0, max_open_s=30.0)


@pytest.fixture
def tripped() -> Breaker:
    """Open since 0, for 10 s."""
    breaker = Breaker(LIMITS)
    assert breaker.trip(0.0, "it hangs")
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(LIMITS)
    assert [breaker.failure(0.0, "x"), breaker.failure(0.0, "x")] == [False, False]
    breaker.success()
    assert not breaker.failure(1.0, "x")
    assert not breaker.failure(1.0, "x")
    assert breaker.state(1.0) is CLOSED
    assert breaker.failure(1.0, "it fails")
    assert (breaker.state(1.0), breaker.reason) == (OPEN, "it fails")


def test_one_tries_after_a_while_and_the_others_wait_for_it(tripped: Breaker) -> None:
    assert (tripped.state(9.9), tripped.remaining_s(4.0)) == (OPEN, 6.0)
    assert not tripped.tries(9.9)
    assert tripped.state(10.0) is HALF_OPEN
    assert tripped.tries(10.0)
    assert tripped.state(10.0) is OPEN
    assert not tripped.tries(10.0)
    assert tripped.success()
    assert tripped.state(10.0) is CLOSED


def test_a_trial_that_fails_keeps_it_open_for_longer_up_to_a_bound(tripped: Breaker) -> None:
    now, waits = 0.0, []
    for _ in range(3):
        now += tripped.remaining_s(now)
        assert tripped.tries(now)
        assert tripped.failure(now, "again")
        waits.append(tripped.remaining_s(now))
    assert waits == [20.0, 30.0, 30.0]


def test_a_trial_that_says_nothing_is_followed_by_another_in_time(tripped: Breaker) -> None:
    assert tripped.tries(10.0)
    assert (tripped.state(19.9), tripped.state(20.0)) == (OPEN, HALF_OPEN)
    assert tripped.tries(20.0)


def test_what_began_before_it_opened_neither_closes_it_nor_lengthens_it(tripped: Breaker) -> None:
    assert not tripped.success()
    assert not tripped.failure(5.0, "so did this")
    assert (tripped.state(5.0), tripped.remaining_s(5.0)) == (OPEN, 5.0)


def test_of_no_time_at_all_it_never_opens() -> None:
    breaker = Breaker(BreakerLimits(1, 0.0, 0.0))
    assert not breaker.failure(0.0, "x")
    assert breaker.state(0.0) is CLOSED


# -- progress


def load(progress: int, *, has_work: bool = True, allowance_s: float = 0.0) -> WorkerLoad:
    return WorkerLoad(0, 1, 0.5, 50, progress, has_work, allowance_s)


class Watched:
    """A worker that is looked at every half second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._watch = ProgressWatch()
        self._frames = 0

    def look(
        self, seconds: float, report: WorkerLoad | None, *, speaks: bool = True, streams: int = 1
    ) -> str:
        """What is said at the latest after so long in which nothing else changes."""
        why = ""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self._frames += speaks
            why = why or self._watch.look(
                self.now, frames=self._frames, streams=streams, load=report, stall_s=2.0
            )
        return why


def test_a_worker_that_gets_on_is_left_alone() -> None:
    watched = Watched()
    for count in range(20):
        assert watched.look(1.5, load(count)) == ""


@pytest.mark.parametrize(
    ("report", "streams"),
    [
        pytest.param(load(5, has_work=False), 1, id="it waits for KV"),
        pytest.param(load(5), 0, id="nobody waits for it"),
        pytest.param(None, 1, id="it has never said how it fares"),
    ],
)
def test_a_worker_that_need_not_get_on_is_left_alone(
    report: WorkerLoad | None, streams: int
) -> None:
    assert Watched().look(60.0, report, streams=streams) == ""


def test_a_worker_that_speaks_and_makes_no_step_hangs() -> None:
    watched = Watched()
    watched.look(5.0, load(7, has_work=False))
    assert watched.look(1.5, load(7)) == ""
    assert watched.look(1.0, load(7)) == "it has work and has made no step for 2.0 s"


@pytest.mark.parametrize(
    ("allowance_s", "out_at_s"),
    [
        pytest.param(0.4, 2.0, id="a short step"),
        pytest.param(2.0, 2.0, id="as long as none is waited for"),
        pytest.param(7.5, 7.5, id="a long step"),
        pytest.param(60.0, 60.0, id="one whose like was never seen"),
    ],
)
def test_a_step_has_the_time_that_its_like_took(allowance_s: float, out_at_s: float) -> None:
    watched, report = Watched(), load(7, allowance_s=allowance_s)
    watched.look(0.5, load(6))
    assert watched.look(out_at_s, report) == ""
    assert watched.look(0.5, report) == f"it has work and has made no step for {out_at_s:.1f} s"


def test_a_worker_that_says_nothing_hangs() -> None:
    watched = Watched()
    watched.look(5.0, load(7, has_work=False))
    assert watched.look(1.5, load(7, has_work=False), speaks=False) == ""
    why = watched.look(1.0, load(7, has_work=False), speaks=False)
    assert why == "it has said nothing for 2.0 s"


def test_a_silent_worker_without_streams_is_the_leases_business() -> None:
    assert Watched().look(60.0, load(7), speaks=False, streams=0) == ""
