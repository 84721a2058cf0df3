"""`slo_aware`: disaggregate where it pays. Decode is placed by load and prefix, then prefill where
the first token is predicted soonest, or on the decode worker itself where that is predicted to cost
everybody together less (router/cost/objective.py).

While too little was measured to predict, it places as `prefix_aware` does, prefill apart.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.kv_pairs import exchange
from pdserve.types import Role
from router.cost.objective import beats
from router.placement.filters import unbarred
from router.placement.pickers import best
from router.placement.policies import prefix_aware
from router.placement.rules import place
from router.placement.values import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.placement.context import CostModel, PlacementContext, Prediction
    from router.placement.values import Candidate, Decision, Demand

RULES = replace(prefix_aware.RULES, name="slo_aware")
# Prefill workers that a prediction is made for: those that score best by load and prefix.
TRIED = 4


def slo_aware(
    candidates: Sequence[Candidate], demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """As the rules place, unless predictions say better."""
    decision = place(RULES, candidates, demand, turn, context)
    placement, cost = decision.placement, context.cost
    if cost is None or placement is None or placement.prefill is None:
        return decision
    remote = _remotes(decision, placement, cost)
    local = cost.predict(demand, None, placement.decode, decision.cached)
    if not remote:
        return decision
    quick = {c: -prediction.cost_s for c, prediction in remote.items()}
    prefill: Candidate | None = best(quick, list(quick), turn)
    if prefill is not None and local is not None and prefers_local(remote[prefill], local):
        prefill = None
    predictions = (*remote.values(), *(() if local is None else (local,)))
    return decision.predicting(Placement(placement.decode, prefill), predictions)


def prefers_local(remote: Prediction, local: Prediction) -> bool:
    """Whether to prefill on the decode worker: a habit is left for what is clearly better."""
    if local.is_habit:
        return not beats(remote.cost_s, local.cost_s)
    return beats(local.cost_s, remote.cost_s)


def _remotes(
    decision: Decision, placement: Placement, cost: CostModel
) -> dict[Candidate, Prediction]:
    """What prefill workers that can hand over to decode's are predicted to do."""
    assert decision.prefill is not None, "prefill was scored"
    totals, demand, decode = decision.prefill.totals, decision.demand, placement.decode
    able = [c for c in totals if c.role is Role.PREFILL and exchange(c.kind, decode.kind)]
    tried = heapq.nlargest(TRIED, unbarred(able, decode, demand.barred), key=totals.__getitem__)
    if placement.prefill is not None and placement.prefill not in tried:
        tried[-1] = placement.prefill
    found = {c: cost.predict(demand, c, decode, decision.cached) for c in tried}
    return {c: prediction for c, prediction in found.items() if prediction is not None}
