"""`power_of_two`: the less loaded of two drawn at random, for each phase (Mitzenmacher, "The Power
of Two Choices in Randomized Load Balancing", 2001).

Where many routers share a pool and each knows the others' work only from reports, the least loaded
worker is the same for all of them until the next report; two at random are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from router.placement.pickers import two
from router.placement.policies import least_loaded
from router.placement.rules import place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

RULES = replace(least_loaded.RULES, name="power_of_two", sample=two)


def power_of_two(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """The draw follows from `turn`, so a decision can be made again."""
    return place(RULES, candidates, demand, turn, context)
