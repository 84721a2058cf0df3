"""Policies that select workers for a request. `POLICIES` maps configuration names to policies.

A policy filters the workers, scores each phase with weighted scorers and selects the best. A decode
worker's total is the mean of its score and that of the best prefill worker that can send it KV. An
aggregated worker competes with the mean of its own two scores. `turn` counts placements. It breaks
ties and seeds draws, so that equal arguments give equal decisions.

A scorer returns 0 to 1; higher is better. A worker that has not reported its load yet scores
UNKNOWN. This router's own placements are always known.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pdserve.errors import Unavailable
from pdserve.kv_compatibility import exchange
from pdserve.types import Role
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
    PrefixLookup,
    Scoreboard,
    Scorer,
    Weights,
)

if TYPE_CHECKING:
    from pdserve.types import WorkerInfo, WorkerLoad
    from router.placement.filters import Eligible

# Score of a value that the worker has not reported yet.
UNKNOWN = 0.5
# Weight of the scorer `adapter` for requests with a LoRA adapter; the policy's weights shrink.
ADAPTER_WEIGHT = 0.3
# Weight of the scorer `session`. A worker of the last turn loses to another one that has a quarter
# more of its slots and KV blocks free.
SESSION_WEIGHT = 0.2
# Weight of the scorer `local`, if some workers have a distance from the router.
LOCAL_WEIGHT = 0.3
# Weight of the distance within a pair. Higher than LOCAL_WEIGHT, because a pair exchanges KV and
# the router only tokens: a whole pair far away is better than half of one.
PAIR_WEIGHT = 0.5
# Scores that differ by less are equal: sums of ratios differ in the last bit.
_EQUAL = 1e-9
# Workers scored for each phase in a larger pool, so that the cost of scoring is bounded. With 64
# random workers, the best one misses the top 5 % of the pool with probability 0.95^64 = 0.04.
MOST_SCORED = 64
MOST_CACHED = 16
# Number of prefill workers for which a latency is predicted: the best by score, since each
# prediction costs much more than a score.
MOST_PREDICTED = 4
# Number of workers that cached KV may be copied from.
MOST_HOLDERS = 4

Workers = Sequence[Candidate]
Place = Callable[[Workers, Demand, int, PlacementContext], Decision]
"""Raises Unavailable if waiting would not help."""


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
    """Return 1 if no prompt tokens wait for prefill, and less in proportion. 0 would be the longest
    queue plus this prompt."""
    tokens = [c.outstanding_tokens for c in workers]
    most = max(tokens, default=0) + max(1, demand.prompt_tokens)
    return [1 - x / most for x in tokens]


def queue_length(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 without requests that wait in the engine, 1/2 with one, 1/3 with two."""
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
    """Return 1 for the workers of the session's last turn. 0 for those that have nothing of the
    prompt cached any more, although others have."""
    last = demand.session_workers
    if cached:
        last = last.intersection(cached)
    return [float(c.worker_id in last) for c in workers]


def local(workers: Workers, _demand: Demand, _cached: Cached) -> list[float]:
    """Return 1 for workers near the router, and less the farther away their labels are."""
    return [nearness(PRIOR_S[c.router_distance]) for c in workers]


def _alike_in_groups(workers: Workers, scores: Iterable[float]) -> list[float]:
    """Return scores of counts of requests. All ranks of a data-parallel group that have any place
    get the lowest: a step is as long as that of the rank with the most tokens, so tokens alone set
    them apart."""
    own, lowest = [max(0.0, x) for x in scores], dict[str, float]()
    for c, x in zip(workers, own, strict=True):
        if c.info.group and x:
            lowest[c.info.group] = min(x, lowest.get(c.info.group, x))
    return [min(x, lowest.get(c.info.group, x)) for c, x in zip(workers, own, strict=True)]


def _reported(workers: Workers, value: Callable[[WorkerInfo, WorkerLoad], float]) -> list[float]:
    return [UNKNOWN if c.load is None else value(c.info, c.load) for c in workers]


def score(workers: Workers, weights: Weights, demand: Demand, cached: Cached) -> Scoreboard:
    more: list[tuple[Scorer, float]] = [(adapter, ADAPTER_WEIGHT)] if demand.adapter else []
    if demand.session_workers:
        more.append((session, SESSION_WEIGHT))
    if any(c.router_distance for c in workers):
        more.append((local, LOCAL_WEIGHT))
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
        decision, holders = Decision(self.name, candidates, demand, turn), _NO_HOLDERS
        if self.uses_prefix and context.prefix is not None:
            decision.cached, decision.asked_prefix = context.prefix.cached_tokens(demand), True
            if context.cost is not None:
                holders = _holders(decision, context)
                _count_tiers(decision, context.prefix, context.cost)
        found = eligible(candidates, demand)
        if demand.prefill_only:
            self._place_prefill(decision, found, holders)
            return decision
        self._place_pair(decision, found, context, holders)
        placement = decision.placement
        if placement is not None and placement.prefill is not None:
            if self.prefill_on != "prefill_worker":
                holders.count([placement.decode], decision)
            if self.prefill_on == "decode_worker":
                decision.placement = Placement(placement.decode)
            elif self.prefill_on == "cheapest" and context.cost is not None:
                _move_to_cheapest(decision, found, context.cost)
        return decision

    def _place_prefill(self, decision: Decision, found: Eligible, holders: _Holders) -> None:
        """Select a worker for a single token, which needs no decode and no transfer."""
        demand = decision.demand
        if not found.prefills and not found.aggregated:
            raise Unavailable(f"no prefill worker is ready for {demand.wanted}")
        roomy = [c for c in found.aggregated if c.has_room(demand)]
        if tried := self._draw(found.prefills + roomy, decision, salt=1):
            holders.count(tried, decision)
            decision.prefill = score(tried, self.prefill, demand, decision.cached)
            decision.totals = decision.prefill.totals
            decision.placement = Placement(best(decision.totals, tried, decision.turn))

    def _place_pair(
        self, decision: Decision, found: Eligible, context: PlacementContext, holders: _Holders
    ) -> None:
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
            return
        # Decode workers of one kind share a list of producers. Draw from it once, by identity:
        # scoring each decode worker's producers anew would cost the product of both pools.
        lists = {id(producers[c]): producers[c] for c in tried if c in producers}
        drawn = {key: self._draw(x, decision, salt=1) for key, x in lists.items()}
        prefills = list(dict.fromkeys(c for x in drawn.values() for c in x))
        prefills += [c for c in tried if c not in producers]
        decode = score(tried, self.decode, demand, cached)
        holders.count(prefills, decision)
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
        decision.decode, decision.prefill, decision.totals = decode, prefill, totals
        decision.placement = Placement(chosen, None if producer is chosen else producer)

    def _draw(
        self, workers: list[Candidate], decision: Decision, *, salt: int = 0
    ) -> list[Candidate]:
        """Return the workers to score.

        These are all workers of a small pool. Of a large pool they are those of the session's last
        turn, those with the most cached tokens, and random others, seeded by the turn. Each phase
        has its own `salt`, so that their draws are independent.
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


@dataclass(frozen=True, slots=True)
class _Holders:
    """Workers that have blocks of the prompt cached and can send them to others, those with the
    most tokens first."""

    workers: Sequence[tuple[Candidate, int]]
    costs: Predictor | None = None

    def count(self, workers: Workers, decision: Decision) -> None:
        """Add the tokens that these workers would have copied to them to `cached`, as the number
        that saves as much time."""
        demand, worth = decision.demand, {}
        for c in filter(_copies, workers):
            has = decision.cached.get(c.worker_id, 0)
            held = self._best_for(c, has, demand)
            if held is None or self.costs is None or c.worker_id in decision.fetches:
                continue
            plan = self.costs.fetch(demand, c, held[0], has, held[1])
            if plan is not None:
                decision.fetches[c.worker_id] = plan
                worth[c.worker_id] = plan.worth
        if worth:
            decision.cached = Counter(decision.cached) + Counter(worth)

    def _best_for(self, c: Candidate, has: int, demand: Demand) -> tuple[Candidate, int] | None:
        for holder, tokens in self.workers:
            if tokens < has + c.info.block_size:
                break
            is_allowed = (holder.worker_id, c.worker_id) not in demand.excluded
            if is_allowed and holder is not c and exchange(holder.kind, c.kind):
                return holder, tokens
        return None


_NO_HOLDERS = _Holders(())


def _copies(c: Candidate) -> bool:
    """Return False for workers of an earlier version too, which would compute the prompt."""
    return c.info.kv is not None and c.info.kv.copies


def _holders(decision: Decision, context: PlacementContext) -> _Holders:
    """Return the workers that KV of the prompt can be copied from. Images are not copied, because
    the holder would need their data; nor is KV of connectors that hand over prefills only."""
    demand, cached = decision.demand, decision.cached
    if not context.fetches or not cached or demand.media:
        return _NO_HOLDERS
    found = [
        (c, cached[c.worker_id])
        for c in feasible([c for c in decision.candidates if c.worker_id in cached], demand)
        if _copies(c) and c.worker_id not in demand.avoid
    ]
    # Those that hold the most, and of these the one with the shortest queue.
    best = heapq.nsmallest(MOST_HOLDERS, found, key=lambda x: (-x[1], x[0].outstanding_tokens))
    return _Holders(best, context.cost)


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


def _move_to_cheapest(decision: Decision, found: Eligible, costs: Predictor) -> None:
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
        return
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
    decision.placement, decision.predictions = Placement(decode, lowest), list(remote.values())
    aggregated = costs.predict(demand, None, decode, cached)
    if aggregated is not None:
        decision.predictions = [*decision.predictions, aggregated]
        if is_clearly_cheaper(aggregated.cost_s, remote[lowest].cost_s):
            decision.placement = Placement(decode)


def _count_tiers(decision: Decision, prefix: PrefixLookup, costs: Predictor) -> None:
    """Add the tokens in host memory to `cached`, as the number that saves as much time."""
    cached, reached = decision.cached, prefix.tokens_with_tiers(decision.demand)
    decision.in_tiers = {
        worker: tokens - cached.get(worker, 0)
        for worker, tokens in reached.items()
        if tokens > cached.get(worker, 0)
    }
    if decision.in_tiers:
        worth = {
            c.worker_id: costs.tier_worth(decision.demand, c, cached.get(c.worker_id, 0), tokens)
            for c in decision.candidates
            if (tokens := decision.in_tiers.get(c.worker_id, 0))
        }
        decision.cached = Counter(cached) + Counter(worth)


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
    if found:
        board = score(found, _LEAST_LOADED.decode, decision.demand, NO_TOKENS_CACHED)
        decision.decode, decision.totals = board, board.totals
        decision.placement = Placement(best(board.totals, found, decision.turn))
    return decision
