"""What refused clients were told: come back then. Room in the queue is kept for those who do.

A client is known again by its request: the same one, from the same tenant. New requests take no
room that is kept for one who is due, so a retry at the time that was told finds some, although the
service is as overloaded as before. Most of the queue at the most is kept: the rest is anybody's, so
that the service is never idle for clients who do not come.
"""

from __future__ import annotations

import math

MAX_RETRY_AFTER_S = 600.0
# A place is kept from so long before the time told until so long after it.
EARLY_S = 1.0
GRACE_S = 1.0
# Promises are made for somewhat less than was measured, so that those kept do not fall behind.
SHARE = 0.7
# Of the places in the queue, the most that is kept; and of the time that one may wait. That is
# less: who comes when told goes first.
KEPT = 0.75
KEPT_TIME = 0.25
MAX_PROMISES = 4096
# However few come again, no more than so many times what could be kept is promised.
_MOST_TIMES = 3.0
_LEARNING = 0.05


class Returns:
    """The share of those who come again when they were told, as it was of late. Nothing is kept for
    clients who do not: places that nobody takes would be lost to all."""

    def __init__(self) -> None:
        self.share = 1.0

    def came(self) -> None:
        self.share += _LEARNING * (1.0 - self.share)

    def stayed_away(self) -> None:
        self.share -= _LEARNING * self.share


class Promises:
    """Those of one model's queue, by the second in which they are due."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._by_second: dict[int, dict[int, None]] = {}
        self._second = 0
        self._renewed = 0.0
        self._returns = Returns()

    def __len__(self) -> int:
        return len(self._due)

    def make(self, identity: int, turn_s: float, now: float) -> float:
        """Whole seconds until there is a place after those that were promised before, as far as
        those are expected to come. Past the longest time or the greatest number that is told, the
        longest time, and nothing is kept."""
        self._forget(now)
        known = self._due.get(identity)
        if known is not None:
            if known > now:
                return math.ceil(known - now)
            self._drop(identity)
        if len(self._due) >= MAX_PROMISES:
            return MAX_RETRY_AFTER_S
        wait_s = self._first_free_s(turn_s, now)
        if wait_s is None:
            return MAX_RETRY_AFTER_S
        self._keep(identity, now + wait_s)
        return wait_s

    def _first_free_s(self, turn_s: float, now: float) -> float | None:
        """Up to then there are turns for all that were promised before it, and one more."""
        expected = max(self._returns.share, 1.0 / _MOST_TIMES)
        turn_s *= expected / SHARE
        second, before = int(now), 0
        for wait in range(1, int(MAX_RETRY_AFTER_S) + 1):
            before += len(self._by_second.get(second + wait, ()))
            if (before + 1) * turn_s <= wait:
                return float(wait)
        return None

    def _keep(self, identity: int, due: float) -> None:
        if not self._due:
            self._second = int(due)
        self._second = min(self._second, int(due))
        self._due[identity] = due
        self._by_second.setdefault(int(due), {})[identity] = None

    def _drop(self, identity: int) -> None:
        second = int(self._due.pop(identity))
        those = self._by_second[second]
        del those[identity]
        if not those:
            del self._by_second[second]

    def kept(self, now: float) -> float:
        """Places kept at this moment, for as many as are expected to come."""
        if not self._due:
            return 0.0
        self._forget(now)
        seconds = range(int(now - GRACE_S), int(now + EARLY_S) + 1)
        due = sum(len(self._by_second.get(second, ())) for second in seconds)
        return due * self._returns.share

    def claim(self, identity: int, now: float) -> bool:
        """Whether a place is kept for this one; it is used up."""
        self._forget(now)
        due = self._due.get(identity)
        if due is None or due > now + EARLY_S:
            return False
        self._drop(identity)
        self._returns.came()
        return True

    def renew(self, identity: int, turn_s: float, now: float) -> float:
        """One that came in time and found no place all the same gets a turn that was not promised
        to others. Whole seconds until then."""
        self._renewed = max(self._renewed, now) + turn_s / (1.0 - SHARE)
        wait_s = min(MAX_RETRY_AFTER_S, float(max(1, math.ceil(self._renewed - now))))
        self._keep(identity, now + wait_s)
        return wait_s

    def _forget(self, now: float) -> None:
        """Those who did not come, once the second in which they were due is over for so long."""
        over = int(now - GRACE_S)
        while self._due and self._second < over:
            for identity in self._by_second.pop(self._second, ()):
                del self._due[identity]
                self._returns.stayed_away()
            self._second += 1
