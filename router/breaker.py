"""A circuit breaker: keeps work from what has failed, then lets one request try.

    closed ──failures in a row, or one that tells all──► open ──time──► half open ──► closed
                                                           ▲                │  one request tries;
                                                           └────failure─────┘  for twice the time

For a worker, or for a pair of workers. Pure; the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Only a closed one lets all work through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`failures` in a row open it, for `open_s`, and longer each time that its trial fails, up to
    `max_open_s`. 0 seconds turn it off."""

    failures: int = 3
    open_s: float = 10.0
    max_open_s: float = 80.0


@dataclass(slots=True)
class Breaker:
    """State: failures in a row; once open, until when, for how long, and why."""

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
        """One more failure. True where that opens it."""
        self.failures += 1
        if self.until is not None or self.failures >= self.limits.failures:
            return self.trip(now, reason, count=False)
        return False

    def trip(self, now: float, reason: str, *, count: bool = True) -> bool:
        """A failure that tells all. True where it was not open already; what fails while it is open
        began before, and changes nothing but the reason."""
        self.failures += count
        if not self.limits.open_s:
            return False
        was_open = self.state(now) is BreakerState.OPEN and not self.is_trying
        if not was_open:
            grown = max(self.limits.open_s, 2 * self.seconds)
            self.seconds = min(grown, max(self.limits.open_s, self.limits.max_open_s))
            self.until, self.is_trying = now + self.seconds, False
        self.reason = reason
        return not was_open

    def tries(self, now: float) -> bool:
        """Work was placed. True where it is the trial of a half-open one, which then is open to
        others until the trial has told, or for as long again."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return False
        self.until, self.is_trying = now + self.seconds, True
        return True

    def success(self) -> bool:
        """Work that it let through went well. True where that closes it."""
        self.failures = 0
        if self.until is None or not self.is_trying:
            return False
        self.until, self.seconds, self.reason, self.is_trying = None, 0.0, "", False
        return True

    def remaining_s(self, now: float) -> float:
        """Until it is half open."""
        return 0.0 if self.until is None else max(0.0, self.until - now)
