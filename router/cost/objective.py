"""What waiting is worth: the one figure in which choices are compared. Pure.

What counts is promises kept, of all who are served. A wait well within its limit breaks none, but
somebody waits, so it costs a little, in proportion; one well beyond it has broken the promise, and
cannot break it twice, so that more of it costs as little again: who is late anyway must not make
others late. Between the two, where a prediction may err to either side, the cost rises steadily:

    x = wait / limit      cost = EARLY · x + (1 - EARLY) · ramp(x) promises
                          ramp: 0 up to 1 - SPREAD, 1 from 1 + SPREAD on

The same holds for the first token and for the mean gap between tokens. A promise is written as the
seconds of the first token's limit, so that costs are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.config import SloConfig

EARLY = 0.1
# By how much of a limit a prediction may be off.
SPREAD = 0.3
# From this share of a worker's seats or blocks on, who comes next may find none.
CROWDED = 0.5
# What is better by less than this share and these seconds is not worth a change of habit.
MARGIN = 0.1
MARGIN_S = 0.002


@dataclass(frozen=True, slots=True)
class Slo:
    """What clients were promised: seconds to the first token, and seconds between tokens. Who is
    predicted to miss one by the factor `reject_factor` is refused; 0 refuses nobody."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    reject_factor: float = 0.0

    @property
    def latest_ttft_s(self) -> float:
        """A later first token is refused; 0 is no limit."""
        return self.ttft_s * self.reject_factor

    @property
    def most_gap_s(self) -> float:
        """No request is taken that brings tokens further apart; 0 is no limit."""
        return self.tpot_s * self.reject_factor

    def first_cost_s(self, ttft_s: float) -> float:
        """Of a first token that comes so late."""
        return self.ttft_s * _cost(ttft_s / self.ttft_s)

    def gap_cost_s(self, tpot_s: float) -> float:
        """Of tokens that come so far apart, on average."""
        return self.ttft_s * _cost(tpot_s / self.tpot_s)

    def seat_cost_s(self, seconds: float, taken: float) -> float:
        """Of seats that come free so much later, in sum, on a worker that has the share `taken` of
        them taken: where none is left others wait for one, and their first tokens with them. How
        late those are is not known, so it is the most that a wait costs."""
        chance = min(1.0, max(0.0, (taken - CROWDED) / (1.0 - CROWDED)))
        return chance * seconds * (EARLY + (1.0 - EARLY) / (2.0 * SPREAD))


def slo_of(config: SloConfig) -> Slo:
    """What a router was told to promise."""
    return Slo(config.ttft_s, config.tpot_s, config.reject_factor)


def _cost(x: float) -> float:
    ramp = min(1.0, max(0.0, (x - 1.0 + SPREAD) / (2.0 * SPREAD)))
    return EARLY * x + (1.0 - EARLY) * ramp


def beats(other_s: float, favoured_s: float) -> bool:
    """Whether a cost is so much lower than that of the choice last made that it should change."""
    return other_s < favoured_s * (1.0 - MARGIN) - EARLY * MARGIN_S
