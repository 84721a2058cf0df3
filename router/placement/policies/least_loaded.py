"""`least_loaded`: prefill where the fewest prompt tokens are outstanding, decode where KV blocks
and seats are free. Of a large pool, among those drawn (`pickers.many`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.placement.rules import Rules, place
from router.placement.scoreboard import Weighted
from router.placement.scorers import outstanding, quiet, room, seats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

RULES = Rules(
    "least_loaded",
    # Decode is slowed by a full KV cache (preemption) and by a large batch alike.
    decode=Weighted(((room, 0.5), (seats, 0.5))),
    # What this router placed is exact; what waits in an engine is as old as its last report.
    prefill=Weighted(((outstanding, 0.8), (quiet, 0.2))),
)


def least_loaded(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """Of all that may, the least loaded; equal ones take turns."""
    return place(RULES, candidates, demand, turn, context)
