"""An answer's way from a worker that is well to another one, with the KV that it has.

    place ─► export (the old worker ends the stream and keeps its KV) ─► take over

The new worker is booked before the old one is asked, so that an answer with nowhere to go stays.
What the export comes to is for the handoff to say; whatever it is, `take` or `close` follows.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from router.booking import Booker, Booking
    from router.flight import Flight

# A step of the old worker, and the way to it and back. Then the answer is computed again.
EXPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Underway:
    transfer_id: str
    booking: Booking
    timer: asyncio.TimerHandle


class Migration:
    """State: what is booked while one flight's answer is being exported. It does not know whose it
    is, else every request would wait for the collector."""

    __slots__ = ("_booker", "_underway")

    def __init__(self, booker: Booker) -> None:
        self._booker = booker
        self._underway: _Underway | None = None

    def begin(self, flight: Flight, worker_id: str, reason: str) -> bool:
        """False, with nothing changed, where the answer cannot leave the worker this way."""
        handoff = flight.handoff
        leg = handoff.exportable(worker_id)
        if leg is None:
            return False
        demand = flight.demand_after(tuple(handoff.tokens))
        try:
            booking = self._booker.book_live(demand, worker_id, cause=reason)
        except PdserveError:
            return False
        timer = asyncio.get_running_loop().call_later(EXPORT_S, _late, flight)
        self._underway = _Underway(uuid.uuid4().hex, booking, timer)
        handoff.export(leg)
        flight.stream_of(leg).export(self._underway.transfer_id)
        return True

    def take(self) -> tuple[str, Booking]:
        """The transfer and what was booked for it, which are the caller's from now on."""
        underway, self._underway = self._underway, None
        assert underway is not None, "an export is taken over once"
        underway.timer.cancel()
        return underway.transfer_id, underway.booking

    def close(self) -> None:
        """It is not to be: lets go of what was booked. Idempotent."""
        if self._underway is not None:
            self.take()[1].release()


def _late(flight: Flight) -> None:
    flight.perform(flight.handoff.export_late())
