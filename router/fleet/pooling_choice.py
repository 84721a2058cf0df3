"""The choice of a pooling worker, which computes embeddings and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Refusal, Unavailable
from router.placement.values import MemberState, may_hold

if TYPE_CHECKING:
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.placement.values import Demand


def pick_pooling_worker(
    fleet: Fleet,
    demand: Demand,
    *,
    without: frozenset[str] = frozenset(),
    avoid: frozenset[str] = frozenset(),
) -> Member:
    """Return the ready pooling worker for `demand` with the shortest prompt queue. `without`: never
    use. `avoid`: use only if no other is ready. Raises Unavailable if none is ready."""
    regions = demand.regions
    found = [m for m in fleet.pooling(demand.model) if m.worker_id not in without]
    ready = [
        m for m in found if m.state is MemberState.READY and may_hold(regions, m.info.topology)
    ]
    if not ready:
        reason = "" if regions is None else Refusal.NO_WORKER_IN_REGION
        raise Unavailable(f"no pooling worker is ready for {demand.wanted}", reason=reason)
    others = [m for m in ready if m.worker_id not in avoid]
    return min(
        others or ready, key=lambda m: (m.placed.outstanding_tokens, m.placed.outstanding_requests)
    )
