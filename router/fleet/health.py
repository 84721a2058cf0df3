"""Health of workers and of pairs of workers, as state machines without I/O.

`StallDetector` finds workers that hang. `Breaker` keeps requests away from what failed until a
probe has passed. `OutlierEjection` has a breaker for each pair of workers between which KV failed.
Times are in seconds on the caller's clock; leases and stalls use `PausingClock`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import WorkerLoad

TICK_S = 0.1
MAX_TICK_S = 0.15  # counted at most for a late tick
# A half-open pair is probed as soon as both workers are ready; one that never is, is forgotten.
_FORGET_PAIR_S = 600.0

Pair = tuple[str, str]
"""Worker ids of producer and consumer. A worker that restarts runs on the same hardware."""


class PausingClock:
    """A clock that pauses while the event loop is blocked.

    A busy router reads frames and renewals late, so silence meanwhile is not the workers' fault.
    The event loop ticks the clock every TICK_S, and a late tick counts MAX_TICK_S at most.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked_at = self._elapsed_s = clock()

    def now(self) -> float:
        """Never goes back."""
        return self._elapsed_s + min(self._clock() - self._ticked_at, MAX_TICK_S)

    def tick(self) -> None:
        self._elapsed_s = self.now()
        self._ticked_at = self._clock()


@dataclass(slots=True)
class StallDetector:
    """Finds a worker that is silent, or whose engine makes no step although it has work.

    A worker with open streams sends a frame at least every half second. `is_suspected` is set by
    the owner for a stalled worker that stays in use because it is the last one.
    """

    frames: int = -1
    heard_at: float = 0.0
    progress: int = -1
    progress_at: float = 0.0
    is_suspected: bool = False

    def check(
        self, now: float, *, frames: int, streams: int, load: WorkerLoad | None, stall_s: float
    ) -> str:
        """Return why the worker is stalled, or "". `frames` counts the frames received, `streams`
        the open ones. Call it several times in `stall_s`; 0 disables it."""
        if frames != self.frames or not streams:
            self.frames, self.heard_at = frames, now
        progress = self.progress if load is None else load.progress
        if progress != self.progress or load is None or not load.has_work or not streams:
            self.progress, self.progress_at = progress, now
        if not stall_s:
            return ""
        if now - self.heard_at >= stall_s:
            return f"no frame for {now - self.heard_at:.1f} s"
        allowed_s = stall_s if load is None else max(stall_s, load.step_allowance_s)
        if now - self.progress_at >= allowed_s:
            return f"no engine step for {now - self.progress_at:.1f} s although it has work"
        return ""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """Circuit breaker.

    closed ── failures in a row ──► open ── time ──► half open ── a probe passes ──► closed
                                     ▲                   │
                                     └── a failure ──────┘  for twice the time, up to 8 times

    It opens for `open_s` after `max_failures`; 0 seconds disable it.
    """

    open_s: float = 10.0
    max_failures: int = 3
    failures: int = 0
    until: float | None = None
    seconds: float = 0.0
    reason: str = ""

    def state(self, now: float) -> BreakerState:
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def failure(self, now: float, reason: str) -> bool:
        """Return True if this failure opens the breaker."""
        if self.until is None and self.failures + 1 < self.max_failures:
            self.failures += 1
            return False
        return self.trip(now, reason)

    def trip(self, now: float, reason: str) -> bool:
        """Open the breaker. Return False if it was open: only the reason changes then."""
        self.failures += 1
        self.reason = reason
        if not self.open_s or self.state(now) is BreakerState.OPEN:
            return False
        self.seconds = min(2 * self.seconds, 8 * self.open_s) or self.open_s
        self.until = now + self.seconds
        return True

    def success(self) -> None:
        """One that began before the breaker opened changes nothing."""
        if self.until is None:
            self.failures = 0

    def close(self) -> None:
        self.failures, self.until, self.seconds, self.reason = 0, None, 0.0, ""

    def remaining_s(self, now: float) -> float:
        """Seconds until it is half open."""
        return 0.0 if self.until is None else max(0.0, self.until - now)


class OutlierEjection:
    """Pairs of workers that must not exchange KV for now, since KV between them failed.

    KV that was damaged twice ejects a pair at once, failed transfers after several in a row; either
    may be the fault of one worker or of the network. 0 seconds disable it. `breakers` has closed
    ones too.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.breakers: dict[Pair, Breaker] = {}

    def corrupted(self, pair: Pair, now: float, reason: str) -> None:
        """KV was damaged on the way, also when it was sent again."""
        self._breaker(pair, now).trip(now, reason)

    def failed(self, pair: Pair, now: float, reason: str) -> bool:
        """A transfer failed. Return True if that ejects the pair."""
        return self._breaker(pair, now).failure(now, reason)

    def _breaker(self, pair: Pair, now: float) -> Breaker:
        for known, breaker in list(self.breakers.items()):
            if breaker.until and now >= breaker.until + _FORGET_PAIR_S:
                del self.breakers[known]
        return self.breakers.setdefault(pair, Breaker(self._seconds))

    def succeeded(self, pair: Pair) -> None:
        """KV arrived undamaged."""
        if pair in self.breakers:
            self.breakers[pair].success()

    def probed(self, pair: Pair) -> None:
        """A probe of the pair passed: it gets requests again."""
        self.breakers.pop(pair, None)

    def ejected(self, now: float) -> frozenset[Pair]:
        """Return the pairs that no request may use."""
        if not self.breakers:
            return frozenset()
        return frozenset(pair for pair, _ in self.listed(now))

    def listed(self, now: float) -> list[tuple[Pair, Breaker]]:
        """Return the open and half-open pairs, in the order of their first failure."""
        return [
            (pair, breaker)
            for pair, breaker in self.breakers.items()
            if breaker.until is not None and now < breaker.until + _FORGET_PAIR_S
        ]

    def half_open(self, now: float) -> list[Pair]:
        return [p for p, x in self.breakers.items() if x.state(now) is BreakerState.HALF_OPEN]
