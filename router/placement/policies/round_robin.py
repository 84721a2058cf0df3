"""`round_robin`: those that may, in turn, whatever their load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.placement.pickers import next_one
from router.placement.rules import Rules, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

RULES = Rules("round_robin", sample=next_one)


def round_robin(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """The next one of each phase; nothing is scored."""
    return place(RULES, candidates, demand, turn, context)
