"""A clock that only moves when it is waited for."""

from __future__ import annotations

import asyncio
import heapq

STEPS_PER_MOMENT = 20


class SteppedClock:
    """Moves to the earliest time slept for, once everything that could run at this one has."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._made = 0

    def now(self) -> float:
        return self.now_s

    async def sleep_until(self, when_s: float) -> None:
        event = asyncio.Event()
        self._made += 1
        heapq.heappush(self._sleepers, (when_s, self._made, event))
        await event.wait()

    async def run(self) -> None:
        while True:
            for _ in range(STEPS_PER_MOMENT):
                await asyncio.sleep(0)
            if self._sleepers:
                when_s, _, event = heapq.heappop(self._sleepers)
                self.now_s = max(self.now_s, when_s)
                event.set()
