"""A trace's requests on their way, each sent when it is due, and what became of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.answers import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.chaos.asking import Asker
    from benchmarks.chaos.asks import Ask

# What is asked again has the number of the first time and this, once for each time.
REPEATED: Final = 1_000_000
_LOOK_S: Final = 0.05


class Load:
    """State: the outcomes so far, by number. ``hold`` keeps back what is due until ``go_on``."""

    def __init__(self, asks: Sequence[Ask], asker: Asker, rate_per_s: float) -> None:
        self._asks = asks
        self._asker = asker
        self._rate_per_s = rate_per_s
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.slow: set[int] = set()
        self.is_over = False

    async def run(self) -> None:
        """Send all and wait for the end of all."""
        began_s = time.monotonic()
        held_s = 0.0
        try:
            for place, ask in enumerate(self._asks):
                due_s = began_s + held_s + place / self._rate_per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if not self._may_send.is_set():
                    since_s = time.monotonic()
                    await self._may_send.wait()
                    held_s += time.monotonic() - since_s
                self.send(ask)
            while self.open():
                await asyncio.wait(self._tasks.values(), timeout=_LOOK_S)
        finally:
            self.is_over = True
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def send(self, ask: Ask) -> None:
        """One request, now."""
        self._send(ask, ask.number, 0.0)

    def repeat(self, number: int, *, slow_s: float = 0.0) -> None:
        """A request of this load once more, by a client that takes so long over each piece."""
        first = number % REPEATED
        ask = next(x for x in self._asks if x.number == first)
        number = first + REPEATED
        while number in self.outcomes:
            number += REPEATED
        if slow_s:
            self.slow.add(number)
        self._send(ask, number, slow_s)

    @property
    def unsent(self) -> int:
        """How many were not sent yet."""
        return len(self._asks) - sum(number < REPEATED for number in self.outcomes)

    def _send(self, ask: Ask, number: int, slow_s: float) -> None:
        outcome = self.outcomes[number] = Outcome(number, time.monotonic())
        self._tasks[number] = asyncio.create_task(self._asker.ask(ask, outcome, slow_s=slow_s))

    def hold(self) -> None:
        """Send nothing for now."""
        self._may_send.clear()

    def go_on(self) -> None:
        """Send again what is due."""
        self._may_send.set()

    def abort(self, number: int) -> None:
        """The client of a request goes away."""
        self._tasks[number].cancel()

    async def over(self) -> None:
        """All have ended."""
        while not self.is_over:  # noqa: ASYNC110 - the end of many tasks has no event
            await asyncio.sleep(_LOOK_S)

    def open(self) -> list[Outcome]:
        """Those that have not ended."""
        return [x for x in self.outcomes.values() if x.ending == "open"]
