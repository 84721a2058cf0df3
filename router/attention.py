"""A clock for what the router hears: it stands still while the router itself does not listen.

A router that is busy (a thousand requests at once), stopped or asleep reads its workers' frames and
renewals late. They may lie in its sockets, so silence in such a time is not the workers'. Each turn
of a busy event loop can take a second, and a frame needs a few turns to be read; so this clock
counts turns rather than seconds once they are long. Pure; the clock beneath is the caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_S = 0.1
# What a tick that came late counts at most.
MAX_TICK_S = 0.15


class Attention:
    """State: the time listened to until the last tick, and when that was. To be ticked by the event
    loop that does the listening, every TICK_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ticked_at = self._listened_s = clock()

    def now(self) -> float:
        """Never goes back, and stands still when a tick is overdue."""
        return self._listened_s + min(self._clock() - self._ticked_at, MAX_TICK_S)

    def tick(self) -> None:
        self._listened_s = self.now()
        self._ticked_at = self._clock()
