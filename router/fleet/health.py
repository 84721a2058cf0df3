"""Health of workers and of pairs of workers, as state machines without I/O.

`StallDetector` finds workers that hang. `Breaker` keeps requests away from what failed, then lets
one try. `OutlierEjection` has a breaker for each pair of workers between which KV failed. Times are
in seconds on the caller's clock; leases and stalls use `PausingClock`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import WorkerLoad

TICK_S = 0.1
MAX_TICK_S = 0.15  # counted at most for a late tick
# Pairs whose last use is remembered; all are forgotten beyond that.
_MAX_PAIRS = 65536
# A probe comes as soon as both workers of a half-open pair are ready.
_PROBE_WITHIN_S = 600.0

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


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`failures` in a row open a breaker for `open_s`, doubled each time that its trial fails, up
    to `max_open_s`. 0 seconds disable it."""

    failures: int = 3
    open_s: float = 10.0
    max_open_s: float = 80.0


@dataclass(slots=True)
class Breaker:
    """Circuit breaker.

    closed ── failures in a row ──► open ── time ──► half open ── trial succeeds ──► closed
                                     ▲                   │
                                     └── trial fails, ───┘  for twice the time
    """

    limits: BreakerLimits
    failures: int = 0
    until: float | None = None
    seconds: float = 0.0
    reason: str = ""
    is_trying: bool = False

    def state(self, now: float) -> BreakerState:
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def failure(self, now: float, reason: str) -> bool:
        """Return True if this failure opens the breaker."""
        self.failures += 1
        if self.until is not None or self.failures >= self.limits.failures:
            return self.trip(now, reason, count=False)
        return False

    def trip(self, now: float, reason: str, *, count: bool = True) -> bool:
        """Open the breaker. Return False if it was open: a failure then began before, and only the
        reason changes."""
        self.failures += count
        if not self.limits.open_s:
            return False
        was_open = self.state(now) is BreakerState.OPEN and not self.is_trying
        if not was_open:
            grown_s = max(self.limits.open_s, 2 * self.seconds)
            self.seconds = min(grown_s, max(self.limits.open_s, self.limits.max_open_s))
            self.until, self.is_trying = now + self.seconds, False
        self.reason = reason
        return not was_open

    def try_once(self, now: float) -> bool:
        """Work was placed. Return True if that is the trial of a half-open breaker; it is then open
        for others until the trial has ended, or as long as before."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return False
        self.until, self.is_trying = now + self.seconds, True
        return True

    def success(self) -> bool:
        """Return True if this success closes the breaker."""
        self.failures = 0
        if self.until is None or not self.is_trying:
            return False
        self.until, self.seconds, self.reason, self.is_trying = None, 0.0, "", False
        return True

    def remaining_s(self, now: float) -> float:
        """Seconds until it is half open."""
        return 0.0 if self.until is None else max(0.0, self.until - now)


@dataclass(frozen=True, slots=True)
class EjectedPair:
    """For `status`; with 0 seconds left the pair is half open."""

    prefill: str
    decode: str
    remaining_s: float
    failures: int
    reason: str = ""


class OutlierEjection:
    """Pairs of workers that must not exchange KV for now, since KV between them failed.

    KV that was damaged twice ejects a pair at once, failed transfers after several in a row; either
    may be the fault of one worker or of the network. With `by_probe` only probes try half-open
    pairs. 0 seconds disable it.
    """

    def __init__(self, seconds: float, failures: int = 3) -> None:
        self.by_probe = False
        self.probes = Counter[str]()  # "passed" and "failed"
        self._limits = BreakerLimits(failures, seconds, seconds)
        self._breakers: dict[Pair, Breaker] = {}
        self._used_at: dict[Pair, float] = {}

    def corrupted(self, pair: Pair, now: float, reason: str = "") -> None:
        """KV was damaged on the way, also when it was sent again."""
        if self._limits.open_s:
            self._forget(now)
            self._breakers.setdefault(pair, Breaker(self._limits)).trip(now, reason)

    def failed(self, pair: Pair, now: float, reason: str) -> bool:
        """A transfer failed. Return True if that ejects the pair."""
        if not self._limits.open_s:
            return False
        self._forget(now)
        return self._breakers.setdefault(pair, Breaker(self._limits)).failure(now, reason)

    def ejected(self, now: float) -> frozenset[Pair]:
        """Return the pairs that no request may use."""
        if not self._breakers:
            return frozenset()
        free = {BreakerState.CLOSED}
        if not self.by_probe:
            free.add(BreakerState.HALF_OPEN)
        return frozenset(p for p, x in self._breakers.items() if x.state(now) not in free)

    def half_open(self, now: float) -> list[Pair]:
        return [p for p, x in self._breakers.items() if x.state(now) is BreakerState.HALF_OPEN]

    def try_once(self, pair: Pair, now: float) -> bool:
        """A request was placed on the pair. Return True if it is the trial of a half-open one."""
        breaker = self._breakers.get(pair)
        return breaker is not None and breaker.try_once(now)

    def succeeded(self, pair: Pair, now: float, *, is_trial: bool = False) -> None:
        """KV arrived undamaged."""
        if len(self._used_at) >= _MAX_PAIRS and pair not in self._used_at:
            self._used_at.clear()
        self._used_at[pair] = now
        breaker = self._breakers.get(pair)
        if breaker is not None and (is_trial or breaker.state(now) is BreakerState.CLOSED):
            del self._breakers[pair]

    def unused_s(self, pair: Pair, now: float) -> float:
        """Return the seconds since KV last arrived; infinite if it never did."""
        return now - self._used_at.get(pair, -inf)

    def listed(self, now: float) -> list[EjectedPair]:
        """Return the open and half-open pairs, in the order of their first failure."""
        self._forget(now)
        return [
            EjectedPair(*pair, x.remaining_s(now), x.failures, x.reason)
            for pair, x in self._breakers.items()
            if x.state(now) is not BreakerState.CLOSED
        ]

    def _forget(self, now: float) -> None:
        """Drop pairs that were half open for as long as open and not tried: their workers may be
        gone."""
        least_s = _PROBE_WITHIN_S if self.by_probe else 0.0
        for pair, x in list(self._breakers.items()):
            if x.until and now >= x.until + max(x.seconds, least_s):
                del self._breakers[pair]
