"""Policies: how workers are chosen for a request. `POLICIES` has them by configuration name.

A policy filters the workers, scores each phase by weights and picks the best. Decode is chosen
first: each decode worker is scored together with the best prefill worker that can give it KV; an
aggregated worker competes with the mean of its own two scores. `turn` counts placements: it breaks
ties and seeds draws, so that equal arguments give equal decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import Unavailable
from pdserve.kv_pairs import exchange
from pdserve.types import Role
from router.placement.cost import beats
from router.placement.filters import (
    AGGREGATED,
    LIVE_KV,
    able,
    eligible,
    prefer,
    what_is_missing,
)
from router.placement.scorers import (
    Draw,
    Phase,
    best,
    cached_share,
    draw_many,
    draw_next,
    draw_two,
    outstanding,
    queue_length,
    room,
    score,
    slots,
)
from router.placement.values import (
    NO_TOKENS_CACHED,
    Candidate,
    Decision,
    Demand,
    Placement,
    PlacementContext,
    Scoreboard,
    Weights,
)

if TYPE_CHECKING:
    from router.placement.filters import Eligible

# Prefill workers for which a latency is predicted: those with the best scores.
MOST_PREDICTED = 4

Place = Callable[[Sequence[Candidate], Demand, int, PlacementContext], Decision]
"""Raises Unavailable if waiting would not help."""


class Prefill(Enum):
    """Where the prompts of decode workers are computed."""

    DISAGGREGATED = auto()
    AGGREGATED = auto()
    CHEAPER = auto()  # where the predicted cost is lower


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    decode: Weights = ()
    prefill: Weights = ()
    draw: Draw = draw_many
    uses_prefix: bool = False
    prefill_on: Prefill = Prefill.DISAGGREGATED

    def __call__(
        self,
        candidates: Sequence[Candidate],
        demand: Demand,
        turn: int,
        context: PlacementContext,
    ) -> Decision:
        found = eligible(candidates, demand)
        prefix = context.prefix if self.uses_prefix else None
        cached = NO_TOKENS_CACHED if prefix is None else prefix.cached_tokens(demand)
        choose = _choose_prefill if demand.prefill_only else _choose_pair
        placement, decode, prefill, totals = choose(self, found, demand, turn, cached)
        decision = Decision(
            self.name,
            candidates,
            demand,
            turn,
            placement,
            decode,
            prefill,
            totals,
            cached,
            asked_prefix=prefix is not None,
        )
        if placement is None or placement.prefill is None:
            return decision
        if self.prefill_on is Prefill.AGGREGATED:
            return structs.replace(decision, placement=Placement(placement.decode))
        if self.prefill_on is Prefill.CHEAPER:
            return _choose_cheaper(decision, placement, found, context)
        return decision


_LEAST_LOADED = Policy(
    "least_loaded",
    # A full KV cache (preemption) and a large batch both slow decode down.
    decode=((room, 0.5), (slots, 0.5)),
    # This router's own placements are exact; a reported queue is as old as the report.
    prefill=((outstanding, 0.8), (queue_length, 0.2)),
)
_PREFIX_AWARE = Policy(
    "prefix_aware",
    # Blocks that decode has cached are not transferred, which is cheap compared with a prefill.
    decode=((cached_share, 0.2), (room, 0.4), (slots, 0.4)),
    # Load counts twice: a prompt that is wholly cached goes past an idle worker until as many
    # tokens wait here as it has itself.
    prefill=((cached_share, 0.3), (outstanding, 0.6), (queue_length, 0.1)),
    uses_prefix=True,
)
_POWER_OF_TWO = replace(_LEAST_LOADED, name="power_of_two", draw=draw_two)
_ALWAYS_AGGREGATED = replace(_PREFIX_AWARE, name="always_aggregated", prefill_on=Prefill.AGGREGATED)
_SLO_AWARE = replace(_PREFIX_AWARE, name="slo_aware", prefill_on=Prefill.CHEAPER)

POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("round_robin", draw=draw_next),
        _LEAST_LOADED,
        # The less loaded of two random workers (Mitzenmacher, 2001): many routers that see the same
        # reports do not all choose the same worker.
        _POWER_OF_TWO,
        _PREFIX_AWARE,
        _ALWAYS_AGGREGATED,
        _SLO_AWARE,
    )
}
least_loaded = _LEAST_LOADED

_Choice = tuple[Placement | None, Scoreboard | None, Scoreboard | None, Mapping[Candidate, float]]


def _choose_prefill(
    policy: Policy, found: Eligible, demand: Demand, turn: int, cached: Mapping[str, int]
) -> _Choice:
    """Choose a worker for one token: no decode, no transfer."""
    if not found.prefills and not found.aggregated:
        raise Unavailable(f"no prefill worker is ready for model {demand.model}")
    roomy = [c for c in found.aggregated if c.has_room(demand.kv_tokens)]
    tried = policy.draw(found.prefills + roomy, turn, Phase.PREFILL, cached)
    if not tried:
        return None, None, None, {}
    board = score(tried, policy.prefill, demand, cached)
    return Placement(best(board.totals, tried, turn)), None, board, board.totals


def _choose_pair(
    policy: Policy, found: Eligible, demand: Demand, turn: int, cached: Mapping[str, int]
) -> _Choice:
    if not found.has_pair and not found.aggregated:
        raise Unavailable(what_is_missing(demand.model, found.prefills, found.decodes))
    roomy = found.with_room(demand.kv_tokens)
    if not roomy:
        return None, None, None, {}
    allowed = {c: found.allowed_producers(c) for c in roomy if c.role is Role.DECODE}
    reachable = [c for c in roomy if allowed.get(c) != []]
    if not reachable:
        # Every pair is excluded: a decode worker does both phases.
        tried = policy.draw(roomy, turn, Phase.DECODE, cached)
        board = score(tried, policy.decode, demand, cached)
        return Placement(best(board.totals, tried, turn)), board, None, board.totals
    tried = policy.draw(reachable, turn, Phase.DECODE, cached)
    # Decode workers of one kind share a list of producers, which is drawn from once.
    drawn = {
        id(allowed[c]): policy.draw(allowed[c], turn, Phase.PREFILL, cached)
        for c in tried
        if c in allowed
    }
    prefills = list(dict.fromkeys(c for producers in drawn.values() for c in producers))
    prefills += [c for c in tried if c not in allowed]
    prefill = score(prefills, policy.prefill, demand, cached)
    winners = {key: best(prefill.totals, producers, turn) for key, producers in drawn.items()}
    partner = {c: winners[id(allowed[c])] if c in allowed else c for c in tried}
    decode = score(tried, policy.decode, demand, cached)
    totals = {c: (decode.totals[c] + prefill.totals[partner[c]]) / 2 for c in tried}
    chosen = best(totals, tried, turn)
    producer = partner[chosen]
    placement = Placement(chosen, None if producer is chosen else producer)
    return placement, decode, prefill, totals


def _choose_cheaper(
    decision: Decision, placement: Placement, found: Eligible, context: PlacementContext
) -> Decision:
    """Choose the prefill worker with the lowest predicted cost, or the decode worker itself if that
    is clearly cheaper. While nothing is predicted, keep the placement."""
    if context.cost is None or decision.prefill is None or placement.prefill is None:
        return decision
    demand, decode, totals = decision.demand, placement.decode, decision.prefill.totals
    producers = [c for c in found.allowed_producers(decode) if c in totals]
    tried = heapq.nlargest(MOST_PREDICTED, producers, key=totals.__getitem__)
    if placement.prefill not in tried:
        tried[-1] = placement.prefill
    predicted = {c: context.cost.predict(demand, c, decode, decision.cached) for c in tried}
    remote = {c: p for c, p in predicted.items() if p is not None}
    if not remote:
        return decision
    aggregated = context.cost.predict(demand, None, decode, decision.cached)
    prefill: Candidate | None = best(
        {c: -p.cost_s for c, p in remote.items()}, list(remote), decision.turn
    )
    predictions = list(remote.values())
    if aggregated is not None:
        predictions.append(aggregated)
        if beats(aggregated.cost_s, min(p.cost_s for p in remote.values())):
            prefill = None
    return structs.replace(decision, placement=Placement(decode, prefill), predictions=predictions)


def place_aggregated(
    candidates: Sequence[Candidate],
    demand: Demand,
    turn: int,
    _context: PlacementContext,
    *,
    waits_for_room: bool = False,
) -> Decision:
    """Choose one worker for both phases: one that decodes, otherwise a prefill worker. Raises
    Unavailable if no worker of the model is ready."""
    ready = able(candidates, demand)
    found = prefer([c for c in ready if c.role is not Role.PREFILL], demand.avoid)
    found = found or prefer(ready, demand.avoid)
    if not found:
        raise Unavailable(f"no worker is ready for model {demand.model}")
    if waits_for_room:
        # A prefill worker's engine queues the request instead.
        found = [c for c in found if c.role is Role.PREFILL or c.has_room(demand.kv_tokens)]
        if not found:
            return Decision(AGGREGATED, candidates, demand, turn, None)
    return _least_loaded_of(AGGREGATED, candidates, found, demand, turn)


def place_or_aggregate(
    policy: Place,
    candidates: Sequence[Candidate],
    demand: Demand,
    turn: int,
    context: PlacementContext,
) -> Decision:
    """Apply `policy`, or `place_aggregated` if there is no pair of workers."""
    try:
        return policy(candidates, demand, turn, context)
    except Unavailable:
        if not able(candidates, demand):
            raise
    return place_aggregated(candidates, demand, turn, context, waits_for_room=True)


def place_live(
    source: Candidate,
    candidates: Sequence[Candidate],
    demand: Demand,
    turn: int,
    _context: PlacementContext,
) -> Decision:
    """Choose the least loaded decode worker that can continue an answer with the KV of `source`.
    Raises Unavailable if there is none with room."""
    found = [
        c
        for c in able(candidates, demand)
        if c.role is Role.DECODE
        and c.worker_id != source.worker_id
        and exchange(source.kind, c.kind)
        and (source.worker_id, c.worker_id) not in demand.excluded
        and c.has_room(demand.kv_tokens)
    ]
    if not found:
        raise Unavailable(f"no decode worker can continue with the KV of {source.worker_id}")
    return _least_loaded_of(LIVE_KV, candidates, found, demand, turn)


def _least_loaded_of(
    name: str,
    candidates: Sequence[Candidate],
    found: list[Candidate],
    demand: Demand,
    turn: int,
) -> Decision:
    board = score(found, _LEAST_LOADED.decode, demand, NO_TOKENS_CACHED)
    placement = Placement(best(board.totals, found, turn))
    return Decision(name, candidates, demand, turn, placement, board, totals=board.totals)
