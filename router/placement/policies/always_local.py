"""`always_local`: decode workers compute the prompts that they decode, and prefill workers only
what needs one token. Disaggregation is measured against it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from router.placement.policies import prefix_aware
from router.placement.rules import place
from router.placement.values import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

RULES = replace(prefix_aware.RULES, name="always_local")


def always_local(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """As the rules place, with prefill where decode is."""
    decision = place(RULES, candidates, demand, turn, context)
    placement = decision.placement
    if placement is None or placement.prefill is None:
        return decision
    return replace(decision, placement=Placement(placement.decode))
