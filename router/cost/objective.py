"""What a second of waiting is worth: the one figure in which choices are compared. Pure.

    cost(t, limit) = EARLY · t                     up to the limit that the SLO sets
                     + 1 · (t - limit)             beyond it

A second past the limit is a second of broken promise and costs 1. A second within it breaks none,
but somebody still waits for it, so it costs a little: between two choices that both keep their
promises the quicker one is better. The same holds for the first token of the request itself and
for each gap between tokens of those who are served beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY = 0.1
# What is better by less than this share and these seconds is not worth a change of habit.
MARGIN = 0.1
MARGIN_S = 0.002


@dataclass(frozen=True, slots=True)
class Slo:
    """What clients were promised: seconds to the first token, and seconds between tokens."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1


def cost_s(waited_s: float, limit_s: float) -> float:
    """Seconds of waiting, weighed; see above."""
    return EARLY * waited_s + (1.0 - EARLY) * max(0.0, waited_s - limit_s)


def beats(other_s: float, favoured_s: float) -> bool:
    """Whether a cost is so much lower than that of the choice last made that it should change."""
    return other_s < favoured_s * (1.0 - MARGIN) - EARLY * MARGIN_S
