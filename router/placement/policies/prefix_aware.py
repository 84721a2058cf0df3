"""`prefix_aware`: where much of the prompt's KV is cached already, unless more waits there than
that saves. Without a lookup of what is cached it is a least loaded policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.placement.rules import Rules, place
from router.placement.scoreboard import Weighted
from router.placement.scorers import cached_share, outstanding, quiet, room, seats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

RULES = Rules(
    "prefix_aware",
    # What decode has cached is not transferred, which is cheap beside a prefill.
    decode=Weighted(((cached_share, 0.2), (room, 0.4), (seats, 0.4))),
    # Load counts twice: a prompt that is cached whole is then drawn past an idle worker until as
    # many tokens wait here as it has itself, which is where going elsewhere starts to pay.
    prefill=Weighted(((cached_share, 0.3), (outstanding, 0.6), (quiet, 0.1))),
    by_prefix=True,
)


def prefix_aware(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """Of all that may, the best by cached share and load; equal ones take turns."""
    return place(RULES, candidates, demand, turn, context)
