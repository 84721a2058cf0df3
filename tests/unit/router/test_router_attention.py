"""What a router has had no time to hear is held against nobody."""

from __future__ import annotations

import pytest

from pdserve.types import Role, WorkerLoad
from router.attention import TICK_S, Attention
from router.fleet import TICKS_A_SWEEP
from router.pool import WorkerPool
from router.progress import ProgressWatch
from tests.fakes import worker_info

STALL_S = 2.0
LEASE_S = 5.0
# What a frame and a renewal take of a busy event loop, in turns: poll, wake, read; and the same
# for each message of an RPC.
TURNS_A_FRAME, TURNS_A_RENEWAL = 4, 8


class BusyRouter:
    """An event loop whose every turn takes `turn_s`, and a worker that sends a frame every half
    second and renews its lease every third of it, unless it `is_dead`."""

    def __init__(self, turn_s: float, *, is_dead: bool = False) -> None:
        self.time = 0.0
        self.judged_at: float | None = None
        self.why = ""
        self._turn_s = turn_s
        self._is_dead = is_dead
        self._attention = Attention(lambda: self.time)
        self._watch = ProgressWatch()
        self._pool = WorkerPool(LEASE_S)
        self._pool.register(worker_info("d", Role.DECODE), self._attention.now())
        self._frames = self._ticks = 0
        self._tick_due = TICK_S

    def run(self, seconds: float) -> None:
        frame_at, renewal_at = self._arrival(0.5, TURNS_A_FRAME), self._arrival(1.7, 8)
        while self.time < seconds and not self.why:
            self.time += self._turn_s
            if not self._is_dead and self.time >= frame_at:
                self._frames += 1
                frame_at = self._arrival(0.5, TURNS_A_FRAME)
            if not self._is_dead and self.time >= renewal_at:
                self._pool.renew("d", "e1", self._attention.now(), load=None, draining=False)
                renewal_at = self._arrival(1.7, TURNS_A_RENEWAL)
            if self.time >= self._tick_due:
                self._tick()

    def _arrival(self, sent_in_s: float, turns: int) -> float:
        return self.time + sent_in_s + turns * self._turn_s

    def _tick(self) -> None:
        self._attention.tick()
        self._tick_due = self.time + TICK_S
        self._ticks += 1
        if self._ticks % TICKS_A_SWEEP:
            return
        now = self._attention.now()
        load = WorkerLoad(0, 1, 0.5, 50, self._frames, has_work=True)
        self.why = self._watch.look(now, frames=self._frames, streams=1, load=load, stall_s=STALL_S)
        if self._pool.expire(now):
            self.why = "its lease ran out"
        if self.why:
            self.judged_at = self.time


@pytest.mark.parametrize("turn_s", [0.001, 0.05, 0.15, 0.3, 0.45, 0.55, 0.7, 1.0, 3.0, 60.0])
def test_a_worker_that_speaks_stays_in_however_busy_the_router_is(turn_s: float) -> None:
    router = BusyRouter(turn_s)
    router.run(60.0 * max(1.0, turn_s))
    assert router.why == ""


def test_a_worker_that_hangs_is_out_within_three_seconds() -> None:
    router = BusyRouter(0.001, is_dead=True)
    router.run(60.0)
    assert router.why.startswith("it has said nothing")
    assert router.judged_at is not None
    assert router.judged_at < 3.0


@pytest.mark.parametrize("turn_s", [0.3, 1.0])
def test_a_busy_router_still_finds_a_worker_that_hangs(turn_s: float) -> None:
    router = BusyRouter(turn_s, is_dead=True)
    router.run(60.0)
    assert router.why.startswith("it has said nothing")


def test_the_clock_never_goes_back_and_counts_no_long_pause() -> None:
    now = 100.0
    attention = Attention(lambda: now)
    seen = [attention.now()]
    for pause in (0.1, 0.1, 3600.0, 0.1):
        now += pause / 2
        seen.append(attention.now())
        now += pause / 2
        attention.tick()
        seen.append(attention.now())
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] < 0.5
