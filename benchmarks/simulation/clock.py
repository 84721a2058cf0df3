"""Virtual time: what is due next happens next, and nobody waits."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class VirtualClock:
    """State: the time in seconds, and what is due; of what is due together, what was asked for
    first is the first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def now(self) -> float:
        return self.now_s

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at that time, or as soon as can be where it is past."""
        heapq.heappush(self._due, (max(when_s, self.now_s), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, call)

    def step(self) -> bool:
        """Go on to what is due next. False where nothing is."""
        if not self._due:
            return False
        self.now_s, _, call = heapq.heappop(self._due)
        call()
        return True
