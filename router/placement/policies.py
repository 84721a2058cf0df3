"""Policies that select workers for a request. `POLICIES` maps configuration names to policies.

A policy filters the workers, scores each phase with weighted scorers and selects the best. A decode
worker's total is the mean of its score and the score of the best prefill worker that can send it
KV. An aggregated worker competes with the mean of its own two scores. `turn` counts placements. It
breaks ties and seeds draws, so that equal arguments give equal decisions.

A scorer returns 0 to 1; higher is better. A worker that has not reported its load scores UNKNOWN.
This router's own placements are always known.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from pdserve.errors import Unavailable
from pdserve.kv_compatibility import exchange
from pdserve.types import Role
from router.placement.cache_sources import NO_SOURCES, find_sources
from router.placement.cost import is_clearly_cheaper
from router.placement.filters import (
    AGGREGATED,
    LIVE_KV,
    eligible,
    feasible,
    prefer,
    what_is_missing,
)
from router.placement.topology import PRIOR_S, distance, nearness
from router.placement.values import (
    NO_TOKENS_CACHED,
    Cached,
    Candidate,
    Decision,
    Demand,
    Placement,
    PlacementContext,
    Predictor,
    Scoreboard,
    Scorer,
    Weights,
)

if TYPE_CHECKING:
    from pdserve.types import WorkerInfo, WorkerLoad
    from router.placement.cache_sources import CacheSources
    from router.placement.filters import Eligible

# Score of a value that the worker has not reported.
UNKNOWN = 0.5
# Weight of the distance within a pair. Higher than the weight of `local`, because a pair exchanges
# KV and the router only tokens: a distant pair is better than a pair split by distance.
PAIR_WEIGHT = 0.5
# Scores that differ by less are equal, because sums of ratios differ in the last bit.
_EQUAL = 1e-9
# Workers scored for each phase in a larger pool, so that the cost of scoring is bounded. With 64
# random workers, the best one misses the top 5 % of the pool with probability 0.95^64 = 0.04.
MOST_SCORED = 64
MOST_CACHED = 16
# Number of prefill workers for which a latency is predicted: the best by score, since each
# prediction costs much more than a score.
MOST_PREDICTED = 4

Workers = Sequence[Candidate]
Place = Callable[[Workers, Demand, int, PlacementContext], Decision]
"""Places a request. Raises Unavailable if waiting would not help."""


def room(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return the share of KV blocks neither reserved by this router nor reported as used."""
    placed = [1 - c.reserved_blocks / c.info.total_blocks for c in workers]
    reported = _reported(workers, lambda info, load: load.free_blocks / info.total_blocks)
    return [max(0.0, min(pair)) for pair in zip(placed, reported, strict=True)]


def slots(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return the share of slots (max_num_seqs) without a running or waiting request."""
    placed = [1 - c.outstanding_requests / c.info.limits.max_num_seqs for c in workers]
    reported = _reported(
        workers,
        lambda info, load: (
            1 - (load.num_running_reqs + load.num_waiting_reqs) / info.limits.max_num_seqs
        ),
    )
    return _alike_in_groups(workers, map(min, placed, reported))


def outstanding(workers: Workers, demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 if no prompt tokens wait for prefill, decreasing linearly to 0 at the longest queue
    plus this prompt."""
    tokens = [c.outstanding_tokens for c in workers]
    most = max(tokens, default=0) + max(1, demand.prompt_tokens)
    return [1 - x / most for x in tokens]


def queue_length(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 / (1 + requests that wait in the engine)."""
    scores = _reported(workers, lambda _, load: 1 / (1 + load.num_waiting_reqs))
    return _alike_in_groups(workers, scores)


def cached_share(workers: Workers, demand: Demand, cached: Cached) -> list[float]:
    """Return the share of the prompt that the worker has cached."""
    tokens = max(1, demand.prompt_tokens)
    return [min(1.0, cached.get(c.worker_id, 0) / tokens) for c in workers]


def adapter(workers: Workers, demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 if the worker used the LoRA adapter recently, 0.8 if it has a free slot (max_loras),
    0 if another adapter has to be evicted."""
    scores = [0.8 * (len(c.resident) < c.info.limits.max_loras) for c in workers]
    pairs = zip(workers, scores, strict=True)
    return [1.0 if demand.adapter in c.resident else score for c, score in pairs]


def session(workers: Workers, demand: Demand, cached: Cached) -> list[float]:
    """Return 1 for the workers of the session's last turn, but 0 if such a worker no longer caches
    any of the prompt while others do."""
    last = demand.session_workers
    if cached:
        last = last.intersection(cached)
    return [float(c.worker_id in last) for c in workers]


def local(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 for workers near the router, and less the farther away their labels are."""
    return [nearness(PRIOR_S[c.router_distance]) for c in workers]


def _alike_in_groups(workers: Workers, scores: Iterable[float]) -> list[float]:
    """Adjust scores that count requests. All ranks of a data-parallel group with free capacity get
    the lowest score among them: ranks step in lockstep, so only scores that count tokens rank
    them."""
    own, lowest = [max(0.0, x) for x in scores], dict[str, float]()
    for c, x in zip(workers, own, strict=True):
        if c.info.group and x:
            lowest[c.info.group] = min(x, lowest.get(c.info.group, x))
    if not lowest:
        return own
    return [min(x, lowest.get(c.info.group, x)) for c, x in zip(workers, own, strict=True)]


def _reported(workers: Workers, value: Callable[[WorkerInfo, WorkerLoad], float]) -> list[float]:
    return [UNKNOWN if c.load is None else value(c.info, c.load) for c in workers]


Applies = Callable[[Workers, Demand], bool]
# Scorers of any policy in some cases, and when. The policy's own weights shrink to the rest.
EXTRA: Sequence[tuple[Scorer, float, Applies]] = (
    (adapter, 0.3, lambda _, demand: bool(demand.adapter)),
    # A worker of the last turn loses to a worker with 25 % more of its slots and KV blocks free.
    (session, 0.2, lambda _, demand: bool(demand.session_workers)),
    (local, 0.3, lambda workers, _: any(c.router_distance for c in workers)),
)


def score(workers: Workers, weights: Weights, demand: Demand, cached: Cached) -> Scoreboard:
    more = [(scorer, weight) for scorer, weight, applies in EXTRA if applies(workers, demand)]
    if weights and more:
        left = 1 - sum(weight for _, weight in more)
        weights = (*more, *((scorer, weight * left) for scorer, weight in weights))
    totals, columns = dict.fromkeys(workers, 0.0 if weights else 1.0), []
    for scorer, weight in weights:
        column = scorer(workers, demand, cached)
        columns.append(column)
        for worker, value in zip(workers, column, strict=True):
            totals[worker] += weight * value
    return Scoreboard(weights, workers, columns, totals)


def best(totals: Mapping[Candidate, float], among: Workers, turn: int) -> Candidate:
    """Return the candidate with the highest total. Equal candidates take turns."""
    highest = max(map(totals.__getitem__, among))
    equals = [c for c in among if highest - totals[c] < _EQUAL]
    return equals[turn % len(equals)]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: the scorers of each phase, the number of workers to score, and where to compute
    prompts. Without scorers, workers take turns."""

    name: str
    decode: Weights = ()
    prefill: Weights = ()
    most_scored: int = MOST_SCORED
    uses_prefix: bool = False
    prefill_on: Literal["prefill_worker", "decode_worker", "cheapest"] = "prefill_worker"

    def __call__(
        self, candidates: Workers, demand: Demand, turn: int, context: PlacementContext
    ) -> Decision:
        sources, prefix = NO_SOURCES, context.prefix if self.uses_prefix else None
        if prefix is not None:
            sources = find_sources(candidates, demand, prefix, context)
        undecided = Decision(
            self.name,
            candidates,
            demand,
            turn,
            cached=sources.cached,
            in_tiers=sources.in_tiers,
            asked_prefix=prefix is not None,
        )
        found = eligible(candidates, demand)
        if demand.prefill_only:
            return self._place_prefill(undecided, found, sources)
        decision = self._place_pair(undecided, found, context, sources)
        placement = decision.placement
        if placement is None or placement.prefill is None or self.prefill_on == "prefill_worker":
            return decision
        decision = sources.with_copies(decision, [placement.decode])
        if self.prefill_on == "decode_worker":
            return structs.replace(decision, placement=Placement(placement.decode))
        if context.cost is not None:
            return _move_to_cheapest(decision, found, context.cost)
        return decision

    def _place_prefill(
        self, decision: Decision, found: Eligible, sources: CacheSources
    ) -> Decision:
        """Select a worker for a single token, which needs no decode and no transfer."""
        demand = decision.demand
        if not found.prefills and not found.aggregated:
            raise Unavailable(f"no prefill worker is ready for {demand.wanted}")
        roomy = [c for c in found.aggregated if c.has_room(demand)]
        tried = self._draw(found.prefills + roomy, decision, salt=1)
        if not tried:
            return decision
        decision = sources.with_copies(decision, tried)
        board = score(tried, self.prefill, demand, decision.cached)
        winner = best(board.totals, tried, decision.turn)
        return structs.replace(
            decision, prefill=board, totals=board.totals, placement=Placement(winner)
        )

    def _place_pair(
        self,
        decision: Decision,
        found: Eligible,
        context: PlacementContext,
        sources: CacheSources,
    ) -> Decision:
        demand, turn, cached = decision.demand, decision.turn, decision.cached
        if not found.has_pair and not found.aggregated:
            raise Unavailable(what_is_missing(demand.wanted, found.prefills, found.decodes))
        roomy = found.with_room(demand)
        producers = {c: found.allowed_producers(c) for c in roomy if c.role is Role.DECODE}
        reachable = [c for c in roomy if producers.get(c) != []]
        if not reachable:
            # Every pair is excluded. Let a decode worker do both phases instead of waiting.
            reachable, producers = roomy, {}
        tried = self._draw(reachable, decision)
        if not tried:
            return decision
        # Decode workers of one kind share a list of producers. Draw from it once, by identity:
        # scoring each decode worker's producers anew would cost the product of both pools.
        lists = {id(producers[c]): producers[c] for c in tried if c in producers}
        drawn = {key: self._draw(x, decision, salt=1) for key, x in lists.items()}
        prefills = list(dict.fromkeys(c for x in drawn.values() for c in x))
        prefills += [c for c in tried if c not in producers]
        decode = score(tried, self.decode, demand, cached)
        decision = sources.with_copies(decision, prefills)
        prefill = score(prefills, self.prefill, demand, decision.cached)
        partner: dict[Candidate, Candidate] = {}
        totals: dict[Candidate, float] = {}
        winners: dict[object, tuple[Candidate, float]] = {}
        for c in tried:
            if c in producers:
                key = (id(producers[c]), *c.info.topology.items())
                if key not in winners:
                    winners[key] = _nearest(prefill, drawn[id(producers[c])], c, decision, context)
                partner[c], prefill_score = winners[key]
            else:
                partner[c], prefill_score = c, prefill.totals[c]
            totals[c] = (decode.totals[c] + prefill_score) / 2
        chosen = best(totals, tried, turn)
        producer = partner[chosen]
        placement = Placement(chosen, None if producer is chosen else producer)
        return structs.replace(
            decision, decode=decode, prefill=prefill, totals=totals, placement=placement
        )

    def _draw(
        self, workers: list[Candidate], decision: Decision, *, salt: int = 0
    ) -> list[Candidate]:
        """Return the workers to score.

        These are all workers of a small pool. From a large pool they are the workers of the
        session's last turn, the workers with the most cached tokens, and random others, seeded by
        the turn. Each phase has its own `salt`, so that their draws are independent.
        """
        turn, cached = decision.turn, decision.cached
        if not self.decode:
            return workers and [workers[turn % len(workers)]]
        if len(workers) <= self.most_scored:
            return workers
        holders = [c for c in workers if c.worker_id in cached] if cached else []
        holders = heapq.nlargest(MOST_CACHED, holders, key=lambda c: cached[c.worker_id])
        if last := decision.demand.session_workers:
            holders = [*(c for c in workers if c.worker_id in last), *holders]
        chance = random.Random(2 * turn + salt)
        others = chance.sample(workers, max(1, self.most_scored - len(holders)))
        return list(dict.fromkeys(holders + others))


def _nearest(
    board: Scoreboard,
    producers: Workers,
    decode: Candidate,
    decision: Decision,
    context: PlacementContext,
) -> tuple[Candidate, float]:
    """Return the best prefill worker for decode workers at the location of `decode`, and its score
    minus the weighted distance of the pair."""
    totals = board.totals
    if decode.info.topology and board.weights:
        totals = dict(totals)
        for c in producers:
            if context.cost is None:
                seconds = PRIOR_S[distance(c.info.topology, decode.info.topology)]
            else:
                seconds = context.cost.distance_s(decision.demand.model, c, decode)
            totals[c] -= PAIR_WEIGHT * (1 - nearness(seconds))
    winner = best(totals, producers, decision.turn)
    return winner, totals[winner]


_LEAST_LOADED = Policy(
    "least_loaded",
    # Equal weights: a full KV cache (preemption) and a large batch both slow decode down.
    decode=((room, 0.5), (slots, 0.5)),
    # This router's own placements are exact; a reported queue is as old as the report.
    prefill=((outstanding, 0.8), (queue_length, 0.2)),
)
_PREFIX_AWARE = Policy(
    "prefix_aware",
    # Cached blocks spare decode only the transfer, which is cheap compared with a prefill.
    decode=((cached_share, 0.2), (room, 0.4), (slots, 0.4)),
    # Load counts twice as much as the cache: a fully cached prompt prefers its worker to an idle
    # one until as many tokens wait there as the prompt has.
    prefill=((cached_share, 0.3), (outstanding, 0.6), (queue_length, 0.1)),
    uses_prefix=True,
)
POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("round_robin"),
        _LEAST_LOADED,
        # The less loaded of two random workers (Mitzenmacher, 2001). Routers that see the same
        # reports then do not all select the same worker.
        replace(_LEAST_LOADED, name="power_of_two", most_scored=2),
        _PREFIX_AWARE,
        replace(_PREFIX_AWARE, name="always_aggregated", prefill_on="decode_worker"),
        replace(_PREFIX_AWARE, name="slo_aware", prefill_on="cheapest"),
    )
}
least_loaded = _LEAST_LOADED


def _move_to_cheapest(decision: Decision, found: Eligible, costs: Predictor) -> Decision:
    """Select the prefill worker with the lowest predicted cost, or the decode worker itself if that
    is clearly cheaper. Keep the placement while nothing can be predicted."""
    placement, board = decision.placement, decision.prefill
    assert placement is not None
    assert placement.prefill is not None
    assert board is not None
    demand, decode, cached = decision.demand, placement.decode, decision.cached
    producers = [c for c in found.allowed_producers(decode) if c in board.totals]
    ranked = heapq.nlargest(MOST_PREDICTED, producers, key=board.totals.__getitem__)
    tried = list(dict.fromkeys((placement.prefill, *ranked)))[:MOST_PREDICTED]
    predicted = {c: costs.predict(demand, c, decode, cached) for c in tried}
    remote = {c: p for c, p in predicted.items() if p is not None}
    if not remote:
        return decision
    lowest = best({c: -p.cost_s for c, p in remote.items()}, list(remote), decision.turn)
    favourite = remote.get(placement.prefill)
    # Costs do not include loading an adapter, and hardly the distance. So keep the policy's choice
    # in these cases, unless another worker is clearly cheaper.
    is_preferred = demand.adapter or distance(lowest.info.topology, placement.prefill.info.topology)
    if (
        is_preferred
        and favourite
        and not is_clearly_cheaper(remote[lowest].cost_s, favourite.cost_s)
    ):
        lowest = placement.prefill
    placement, predictions = Placement(decode, lowest), list(remote.values())
    aggregated = costs.predict(demand, None, decode, cached)
    if aggregated is not None:
        predictions.append(aggregated)
        if is_clearly_cheaper(aggregated.cost_s, remote[lowest].cost_s):
            placement = Placement(decode)
    return structs.replace(decision, placement=placement, predictions=predictions)


def place_aggregated(
    candidates: Workers,
    demand: Demand,
    turn: int,
    _context: PlacementContext,
    *,
    waits_for_room: bool = False,
) -> Decision:
    """Select one worker for both phases: one that decodes, or else a prefill worker. Raises
    Unavailable if no worker of the model is ready."""
    ready = feasible(candidates, demand)
    found = prefer([c for c in ready if c.role is not Role.PREFILL], demand.avoid)
    found = found or prefer(ready, demand.avoid)
    if not found:
        raise Unavailable(f"no worker is ready for {demand.wanted}")
    if waits_for_room:
        # A prefill worker reserves no KV blocks; its engine queues the request.
        found = [c for c in found if c.role is Role.PREFILL or c.has_room(demand)]
    return _least_loaded_of(found, Decision(AGGREGATED, candidates, demand, turn))


def place_or_aggregate(
    policy: Place, candidates: Workers, demand: Demand, turn: int, context: PlacementContext
) -> Decision:
    """Apply `policy`, or `place_aggregated` if there is no pair of workers."""
    try:
        return policy(candidates, demand, turn, context)
    except Unavailable:
        # Without any usable worker, the policy's error names what is missing.
        if not feasible(candidates, demand):
            raise
    return place_aggregated(candidates, demand, turn, context, waits_for_room=True)


def place_live(
    source: Candidate, candidates: Workers, demand: Demand, turn: int, _context: PlacementContext
) -> Decision:
    """Select the least loaded decode worker with room that can continue an answer with the KV of
    `source`. Raises Unavailable if there is none."""
    found = [
        c
        for c in feasible(candidates, demand)
        if c.role is Role.DECODE
        and c.worker_id != source.worker_id
        and exchange(source.kind, c.kind)
        and (source.worker_id, c.worker_id) not in demand.excluded
        and c.has_room(demand)
    ]
    if not found:
        raise Unavailable(f"no decode worker can continue with the KV of {source.worker_id}")
    return _least_loaded_of(found, Decision(LIVE_KV, candidates, demand, turn))


def _least_loaded_of(found: list[Candidate], decision: Decision) -> Decision:
    if not found:
        return decision
    board = score(found, _LEAST_LOADED.decode, decision.demand, NO_TOKENS_CACHED)
    placement = Placement(best(board.totals, found, decision.turn))
    return structs.replace(decision, decode=board, totals=board.totals, placement=placement)
