"""Clients who were refused come again when they were told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.arrivals import Arrival
    from benchmarks.simulation.flight import Outcome
    from benchmarks.simulation.service import Service


class Retries:
    """Asks for clients, each up to `most` times more. State: how often somebody came again, and for
    what reasons those were refused once more."""

    def __init__(self, service: Service, most: int) -> None:
        self.made = 0
        self.refused: Counter[str] = Counter()
        self._service = service
        self._most = most

    def ask(self, index: int, arrival: Arrival, on_end: Callable[[Outcome], None]) -> None:
        """A request comes; `on_end` hears once how it ended in the end."""
        self._ask(index, arrival, on_end, 1, self._service.clock.now_s)

    def _ask(
        self,
        index: int,
        arrival: Arrival,
        on_end: Callable[[Outcome], None],
        tries: int,
        first_s: float,
    ) -> None:
        def ended(outcome: Outcome) -> None:
            told_s = outcome.retry_after_s
            if tries > 1 and told_s:
                self.refused[outcome.error] += 1
            if told_s and tries <= self._most:
                self.made += 1
                self._service.clock.after(
                    told_s, lambda: self._ask(index, arrival, on_end, tries + 1, first_s)
                )
                return
            on_end(replace(outcome, arrived_s=first_s, tries=tries))

        self._service.ask(index, arrival, ended)
