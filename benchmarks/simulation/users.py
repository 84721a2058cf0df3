"""Users who ask, wait for the whole answer, think, and ask again; and lengths around a mean."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.simulation.arrivals import Arrival

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.flight import Outcome
    from benchmarks.simulation.service import Service

# Of the gamma distribution that lengths are drawn from: half the mean is their deviation.
_SHAPE: Final = 4


def around(mean: int, draw: random.Random) -> int:
    """A length with that mean."""
    return max(1, round(draw.gammavariate(_SHAPE, mean / _SHAPE)))


def pairs_around(tokens_in: int, tokens_out: int, count: int, seed: int) -> list[tuple[int, int]]:
    """So many pairs of lengths, drawn alike for the same seed."""
    draw = random.Random(f"lengths {seed}")
    return [(around(tokens_in, draw), around(tokens_out, draw)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Users:
    """`count` of them, who think for `think_s` on average. They come one after another within
    `ramp_s`, and ask until `ramp_s + duration_s`. Each takes the next of `pairs`."""

    count: int
    think_s: float
    ramp_s: float
    duration_s: float
    pairs: tuple[tuple[int, int], ...]
    seed: int = 0

    @property
    def end_s(self) -> float:
        return self.ramp_s + self.duration_s


class UserRun:
    """State: how many requests were asked, and how those that ended did."""

    def __init__(self, service: Service, users: Users) -> None:
        self.outcomes: list[Outcome] = []
        self._service = service
        self._users = users
        self._draw = random.Random(f"users {users.seed}")
        self._asked = 0

    def start(self) -> None:
        """Have everyone come."""
        users = self._users
        for number in range(users.count):
            self._service.clock.at(users.ramp_s * number / users.count, self._ask)

    @property
    def is_over(self) -> bool:
        """Whether nobody asks any more and all is answered."""
        return self._service.clock.now_s >= self._users.end_s and not self._service.open_requests

    def _ask(self) -> None:
        users, clock = self._users, self._service.clock
        if clock.now_s >= users.end_s:
            return
        prompt, output = users.pairs[self._asked % len(users.pairs)]
        arrival = Arrival(clock.now_s, prompt, output)
        self._asked += 1
        self._service.ask(self._asked, arrival, self._on_end(self._think_s()))

    def _think_s(self) -> float:
        think_s = self._users.think_s
        return self._draw.expovariate(1 / think_s) if think_s else 0.0

    def _on_end(self, think_s: float) -> Callable[[Outcome], None]:
        def on_end(outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            # Who was refused asks again after a second at the soonest, as a person would.
            pause_s = max(think_s, 1.0) if outcome.error else think_s
            self._service.clock.after(pause_s, self._ask)

        return on_end
