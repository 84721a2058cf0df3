"""Health of workers and of pairs of workers, as state machines without I/O.

`StallDetector` detects workers that hang. `Breaker` keeps requests off a failed worker or pair
until a probe has passed. `OutlierEjection` has one breaker per pair of workers with failed KV
transfers. Times are in seconds on the caller's clock; leases and stalls use `PausingClock`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import WorkerLoad

TICK_S = 0.1
MAX_TICK_S = 0.15  # longest time counted for a late tick
# A half-open pair is probed as soon as both workers are ready. Pairs whose worker never returns are
# forgotten after this time, and so are failures too few to eject a pair.
_FORGET_PAIR_S = 600.0

Pair = tuple[str, str]
"""Worker ids of producer and consumer, not instance ids: a worker that restarts runs on the same
hardware."""


class PausingClock:
    """A clock that pauses while the event loop is blocked.

    A busy router reads frames and renewals late. With a plain clock it would blame healthy workers
    for its own delay. The event loop ticks the clock every TICK_S, and a late tick counts at most
    `max_tick_s`.
    """

    def __init__(self, clock: Callable[[], float], max_tick_s: float = MAX_TICK_S) -> None:
        self._clock = clock
        self._max_tick_s = max_tick_s
        self._ticked_at = self._elapsed_s = clock()

    def now(self) -> float:
        """Return the time in seconds. It never decreases."""
        return self._elapsed_s + min(self._clock() - self._ticked_at, self._max_tick_s)

    def tick(self) -> None:
        self._elapsed_s = self.now()
        self._ticked_at = self._clock()


@dataclass(slots=True)
class StallDetector:
    """Detects a worker that is silent, or whose engine has work but completes no step.

    A worker with open streams sends a frame at least every half second.
    """

    frames: int = -1
    heard_at: float = 0.0
    progress: int = -1
    progress_at: float = 0.0

    def check(
        self, now: float, *, frames: int, streams: int, load: WorkerLoad | None, stall_s: float
    ) -> str:
        """Return why the worker is stalled, or "".

        `frames`: number of frames received. `streams`: number of open streams. Must be called
        several times per `stall_s`. A `stall_s` of 0 disables the check.
        """
        # A worker without streams may be silent, and one without work makes no steps.
        if frames != self.frames or not streams:
            self.frames, self.heard_at = frames, now
        progress = self.progress if load is None else load.progress
        if progress != self.progress or load is None or not load.has_work or not streams:
            self.progress, self.progress_at = progress, now
        if not stall_s:
            return ""
        if now - self.heard_at >= stall_s:
            return f"no frame for {now - self.heard_at:.1f} s"
        # Some steps are slow without a fault: the first ones, or one with a very long prompt.
        allowed_s = stall_s if load is None else max(stall_s, load.step_allowance_s)
        # On a busy machine, only time in which the engine had a CPU counts.
        starved_s = 0.0 if load is None else load.starved_s
        if now - self.progress_at - starved_s >= allowed_s:
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

    It opens for `open_s` after `max_failures` in a row. An `open_s` of 0 disables it. Only a probe
    closes it, so that no client's request tests whether the failure persists.
    """

    open_s: float = 10.0
    max_failures: int = 3
    failures: int = 0
    failed_at: float = 0.0
    until: float | None = None
    seconds: float = 0.0
    reason: str = ""

    def state(self, now: float) -> BreakerState:
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def failure(self, now: float, reason: str) -> bool:
        """Record a failure. Return True if it opens the breaker."""
        if self.until is None and self.failures + 1 < self.max_failures:
            self.failures += 1
            return False
        return self.trip(now, reason)

    def trip(self, now: float, reason: str, *, least_s: float = 0.0) -> bool:
        """Open the breaker, for `least_s` at least. Return False if it was open already; then only
        the reason and that time change."""
        self.failures += 1
        self.reason = reason
        if not self.open_s:
            return False
        was_open = self.state(now) is BreakerState.OPEN
        if not was_open:
            # Doubled each time, so that a worker that keeps failing is probed ever less often.
            self.seconds = min(2 * self.seconds, 8 * self.open_s) or self.open_s
            self.until = now + self.seconds
        self.until = max(self.until or 0.0, now + least_s)
        return not was_open

    def success(self) -> None:
        """Reset the count of failures. Ignored while the breaker is not closed: the request began
        before it opened."""
        if self.until is None:
            self.failures = 0

    def close(self) -> None:
        self.failures, self.until, self.seconds, self.reason = 0, None, 0.0, ""

    def remaining_s(self, now: float) -> float:
        """Seconds until it is half open."""
        return 0.0 if self.until is None else max(0.0, self.until - now)


class OutlierEjection:
    """Pairs of workers that must not exchange KV for now, because transfers between them failed.

    KV that is damaged again after a repeat ejects a pair at once; failed transfers eject it after
    several in a row. Pairs are ejected and not workers, because either worker or the network may be
    at fault. 0 `seconds` disable it. `breakers` includes closed breakers of pairs that failed
    recently.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.breakers: dict[Pair, Breaker] = {}

    def corrupted(self, pair: Pair, now: float, reason: str, *, least_s: float = 0.0) -> None:
        """Record KV that was damaged in transfer, also after one repeat, or gave wrong tokens.
        Ejects the pair, for `least_s` at least."""
        self._breaker(pair, now).trip(now, reason, least_s=least_s)

    def failed(self, pair: Pair, now: float, reason: str) -> bool:
        """Record a failed transfer. Return True if it ejects the pair."""
        return self._breaker(pair, now).failure(now, reason)

    def _breaker(self, pair: Pair, now: float) -> Breaker:
        # Forgotten here and not by a timer, because only failures add pairs.
        for known, breaker in list(self.breakers.items()):
            if now >= (breaker.until or breaker.failed_at) + _FORGET_PAIR_S:
                del self.breakers[known]
        breaker = self.breakers.setdefault(pair, Breaker(self._seconds))
        breaker.failed_at = now
        return breaker

    def succeeded(self, pair: Pair) -> None:
        """Record a transfer that arrived undamaged."""
        if pair in self.breakers and self.breakers[pair].until is None:
            del self.breakers[pair]

    def probed(self, pair: Pair) -> None:
        """Return the pair to use after a successful probe."""
        self.breakers.pop(pair, None)

    def ejected(self, now: float) -> frozenset[Pair]:
        """Return the open and half-open pairs, which no request may use."""
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
