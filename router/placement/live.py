"""Where an answer goes on that leaves its worker together with its KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.kv_pairs import exchange
from pdserve.types import Role
from router.placement.filters import able
from router.placement.recompute import best_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import PlacementContext
    from router.placement.policies.by_name import Policy
    from router.placement.values import Candidate, Decision, Demand

NAME = "live_kv"


def place_live(source: Candidate) -> Policy:
    """The least loaded decode worker that can have KV from `source`, whatever the role of that, and
    has room: nobody waits, for the answer goes on where it is meanwhile. Raises Unavailable where
    there is none."""

    def place(
        candidates: Sequence[Candidate], demand: Demand, turn: int, _context: PlacementContext
    ) -> Decision:
        found = [
            c
            for c in able(candidates, demand)
            if c.role is Role.DECODE
            and c.worker_id != source.worker_id
            and exchange(source.kind, c.kind)
            and (source.worker_id, c.worker_id) not in demand.barred
            and c.has_room(demand.kv_tokens)
        ]
        if not found:
            raise Unavailable(f"no decode worker can go on with the KV of {source.worker_id}")
        return best_of(NAME, candidates, found, demand, turn)

    return place
