"""What the router's own code costs in a simulation: this thread's CPU time inside of admission,
placement and cost learning, without the modelled workers that they call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.flight import Flight
    from pdserve.errors import PdserveError
    from router.admission.gate import Grant
    from router.booking import Booking


class RouterMeter:
    """State: seconds of CPU in the router's code so far, how often a placement was tried, how often
    found, and what the tries cost of it all. One simulation at a time."""

    def __init__(self) -> None:
        self.cpu_s = self.tries_s = 0.0
        self.tries = self.placed = 0
        self._depth = 0
        self._since = 0.0

    @property
    def per_second(self) -> float:
        """Requests placed by one core, with all that the router's code did beside."""
        return self.placed / max(self.cpu_s, 1e-9)

    def time(self, owner: object, *methods: str) -> None:
        """Count calls of these as the router's; those within one another once."""
        for name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def count(self, owner: object, method: str) -> None:
        """Count calls of this one as tries."""
        inner = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            found = inner(*args, **kwargs)
            self.tries_s += time.thread_time() - start
            self.tries += 1
            self.placed += found is not None
            return found

        setattr(owner, method, call)

    def untimed(self, flight: Flight) -> _Untimed:
        """What `flight` does when it is called back is the simulation's."""
        return _Untimed(flight, self)

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self._since = time.thread_time()
            self._depth += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.cpu_s += time.thread_time() - self._since

        return call

    def outside(self, call: Callable[[], None]) -> None:
        """Call what is not the router's, from within it."""
        depth, self._depth = self._depth, 0
        if depth:
            self.cpu_s += time.thread_time() - self._since
        try:
            call()
        finally:
            self._depth = depth
            self._since = time.thread_time()


class _Untimed:
    """A waiter in place of a flight."""

    __slots__ = ("_flight", "_meter")

    def __init__(self, flight: Flight, meter: RouterMeter) -> None:
        self._flight = flight
        self._meter = meter

    @property
    def is_gone(self) -> bool:
        return self._flight.is_gone

    def granted(self, grant: Grant[Booking]) -> None:
        self._meter.outside(lambda: self._flight.granted(grant))

    def refused(self, error: PdserveError) -> None:
        self._meter.outside(lambda: self._flight.refused(error))
