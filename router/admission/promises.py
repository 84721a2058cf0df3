"""What refused clients were told: come back then. A place in the queue is kept for those who do.

A client is known again by its request: the same one, from the same tenant. New requests take no
place that is kept for one who is due, so a retry at the time that was told finds one, although the
service is as overloaded as before.
"""

from __future__ import annotations

import math
from collections import OrderedDict

MAX_RETRY_AFTER_S = 600.0
# A place is kept from so long before the time told until so long after it.
EARLY_S = 1.0
GRACE_S = 2.0
# Promises are made for somewhat less than was measured, so that those kept do not fall behind.
SHARE = 0.8
MAX_PROMISES = 4096
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
    """Those of one model's queue, in the order in which they are due."""

    def __init__(self) -> None:
        self._due: OrderedDict[int, float] = OrderedDict()
        self._last = 0.0
        self._returns = Returns()

    def __len__(self) -> int:
        return len(self._due)

    def make(self, identity: int, turn_s: float, now: float) -> float:
        """Whole seconds until a place is free after those that were promised before. Past the
        longest time or the greatest number that is told, the longest time, and nothing is kept."""
        self._forget(now)
        known = self._due.get(identity)
        if known is not None and known > now:
            return math.ceil(known - now)
        self._due.pop(identity, None)
        at = max(self._last, now) + turn_s / SHARE
        wait_s = float(max(1, math.ceil(at - now)))
        if wait_s > MAX_RETRY_AFTER_S or len(self._due) >= MAX_PROMISES:
            return MAX_RETRY_AFTER_S
        self._last = at
        self._due[identity] = now + wait_s
        return wait_s

    def kept(self, now: float) -> int:
        """Places kept at this moment, for as many as are expected to come."""
        self._forget(now)
        kept = 0
        for due in self._due.values():
            if due > now + EARLY_S + 1.0:
                break  # whole seconds were told: neighbours may be out of order by one
            kept += due <= now + EARLY_S
        return math.ceil(kept * self._returns.share)

    def claim(self, identity: int, now: float) -> bool:
        """Whether a place is kept for this one; it is used up."""
        self._forget(now)
        due = self._due.get(identity)
        if due is None or due > now + EARLY_S:
            return False
        del self._due[identity]
        self._returns.came()
        return True

    def renew(self, identity: int, now: float) -> float:
        """One that came in time and found no place all the same is the first to get the next."""
        self._due[identity] = now + EARLY_S
        self._due.move_to_end(identity, last=False)
        return EARLY_S

    def _forget(self, now: float) -> None:
        while self._due:
            identity, due = next(iter(self._due.items()))
            if due + GRACE_S >= now:
                return
            del self._due[identity]
            self._returns.stayed_away()
