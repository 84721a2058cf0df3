"""Where a request goes on from its tokens alone."""

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
    from router.placement.values import Candidate, Demand

NAME = "recompute"


def place_recompute(
    candidates: Sequence[Candidate], demand: Demand, turn: int, _context: PlacementContext
) -> Decision:
    """The worker that goes on with a request alone: one that decodes, else one that prefills. Room
    is not waited for: the request has been admitted, and its client is reading.

    Raises Unavailable where no worker of the model is ready.
    """
    ready = able(candidates, demand)
    for roles in ((Role.DECODE, Role.AGGREGATED), (Role.PREFILL,)):
        found = prefer([c for c in ready if c.role in roles], demand.avoid)
        if found:
            board = score(found, RULES.decode, demand, NO_TOKENS_CACHED)
            placement = Placement(best(board.totals, found, turn))
            return Decision(
                NAME, candidates, demand, turn, placement, decode=board, totals=board.totals
            )
    raise Unavailable(f"no worker is ready for model {demand.model}")
