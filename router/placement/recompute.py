"""One worker for both phases: where a request goes on from its tokens alone, and where a new one
goes while there is no pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.types import Role
from router.placement.filters import able, prefer
from router.placement.pickers import best
from router.placement.policies.least_loaded import RULES
from router.placement.scoreboard import score
from router.placement.values import NO_TOKENS_CACHED, Decision, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.policies.by_name import Policy
    from router.placement.values import Candidate, Demand

NAME = "recompute"
ALONE = "alone"


def place_recompute(
    candidates: Sequence[Candidate], demand: Demand, turn: int, _context: PlacementContext
) -> Decision:
    """The worker that goes on with a request alone: one that decodes, else one that prefills. Room
    is not waited for: the request has been admitted, and its client is reading.

    Raises Unavailable where no worker of the model is ready.
    """
    found = _one_role(candidates, demand)
    if not found:
        raise Unavailable(f"no worker is ready for model {demand.model}")
    return best_of(NAME, candidates, found, demand, turn)


def or_alone(policy: Policy) -> Policy:
    """As `policy` places; where it has no pair to place on, as a recompute, but with room."""

    def place(
        candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
    ) -> Decision:
        try:
            return policy(candidates, demand, turn, context)
        except Unavailable:
            found = _one_role(candidates, demand)
            if not found:
                raise
        roomy = [c for c in found if c.role is Role.PREFILL or c.has_room(demand.kv_tokens)]
        if not roomy:
            return Decision(ALONE, candidates, demand, turn, None)
        return best_of(ALONE, candidates, roomy, demand, turn)

    return place


def _one_role(candidates: Sequence[Candidate], demand: Demand) -> list[Candidate]:
    """Those that decode, else those that prefill."""
    ready = able(candidates, demand)
    for roles in ((Role.DECODE, Role.AGGREGATED), (Role.PREFILL,)):
        found = prefer([c for c in ready if c.role in roles], demand.avoid)
        if found:
            return found
    return []


def best_of(
    name: str, candidates: Sequence[Candidate], found: list[Candidate], demand: Demand, turn: int
) -> Decision:
    """The least loaded of `found`, by what decode takes."""
    board = score(found, RULES.decode, demand, NO_TOKENS_CACHED)
    placement = Placement(best(board.totals, found, turn))
    return Decision(name, candidates, demand, turn, placement, decode=board, totals=board.totals)
