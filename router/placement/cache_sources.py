"""Where workers have KV of a prompt: in their cache, in host memory, or by a copy from a holder.

`find_sources` looks this up before a policy runs. A policy passes a decision and workers to
`with_copies`, which predicts copies for these workers alone, since each prediction costs more than
a score.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from pdserve.kv_compatibility import exchange
from router.placement.filters import feasible
from router.placement.values import NO_TOKENS_CACHED, Cached, Decision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from router.placement.values import (
        Candidate,
        Demand,
        PlacementContext,
        Predictor,
        PrefixFetch,
        PrefixLookup,
    )

# Number of workers that cached KV may be copied from.
MOST_HOLDERS = 4


class CacheSources(Struct, frozen=True):
    """KV of one prompt. `cached`: tokens by worker id; tokens in host memory count as the number
    that saves as much time. `in_tiers`: tokens in host memory. `holders`: workers that can send
    cached tokens to others, most tokens first. `costs`: predicts copies."""

    cached: Cached = NO_TOKENS_CACHED
    in_tiers: Mapping[str, int] = NO_TOKENS_CACHED
    holders: Sequence[tuple[Candidate, int]] = ()
    costs: Predictor | None = None

    def with_copies(self, decision: Decision, workers: Iterable[Candidate]) -> Decision:
        """Return `decision` with the copies that would save these workers time in `fetches`, and
        their tokens in `cached`, as the number that saves as much time."""
        costs, demand, cached = self.costs, decision.demand, decision.cached
        if costs is None or not self.holders:
            return decision
        found: dict[str, PrefixFetch] = {}
        for c in workers:
            has = cached.get(c.worker_id, 0)
            if c.worker_id in decision.fetches or not _copies(c):
                continue
            if (held := self._best_for(c, has, demand)) is None:
                continue
            plan = costs.fetch(demand, c, held[0], has, held[1])
            if plan is not None:
                found[c.worker_id] = plan
        if not found:
            return decision
        worth = Counter({name: plan.worth for name, plan in found.items()})
        return structs.replace(
            decision, fetches={**decision.fetches, **found}, cached=Counter(cached) + worth
        )

    def _best_for(self, c: Candidate, has: int, demand: Demand) -> tuple[Candidate, int] | None:
        for holder, tokens in self.holders:
            if tokens < has + c.info.block_size:
                break
            is_allowed = (holder.worker_id, c.worker_id) not in demand.excluded
            if is_allowed and holder is not c and exchange(holder.kind, c.kind):
                return holder, tokens
        return None


NO_SOURCES = CacheSources()


def find_sources(
    candidates: Sequence[Candidate],
    demand: Demand,
    prefix: PrefixLookup,
    context: PlacementContext,
) -> CacheSources:
    """Look up the caches of the candidates."""
    cached, costs = prefix.cached_tokens(demand), context.cost
    if costs is None:
        return CacheSources(cached)
    reached = prefix.tokens_with_tiers(demand)
    in_tiers = {
        worker: tokens - cached.get(worker, 0)
        for worker, tokens in reached.items()
        if tokens > cached.get(worker, 0)
    }
    holders = _holders(candidates, demand, cached) if context.fetches else ()
    if in_tiers:
        worth = {
            c.worker_id: costs.tier_worth(demand, c, cached.get(c.worker_id, 0), tokens)
            for c in candidates
            if (tokens := in_tiers.get(c.worker_id, 0))
        }
        cached = Counter(cached) + Counter(worth)
    return CacheSources(cached, in_tiers, holders, costs)


def _holders(
    candidates: Sequence[Candidate], demand: Demand, cached: Cached
) -> Sequence[tuple[Candidate, int]]:
    """Return the workers that KV of the prompt can be copied from. Images are not copied, because
    the holder would need their data; nor is KV of connectors that hand over prefills only."""
    if not cached or demand.media:
        return ()
    found = [
        (c, cached[c.worker_id])
        for c in feasible([c for c in candidates if c.worker_id in cached], demand)
        if _copies(c) and c.worker_id not in demand.avoid
    ]
    # The most cached tokens first; among equals, the shortest queue first.
    return heapq.nsmallest(MOST_HOLDERS, found, key=lambda x: (-x[1], x[0].outstanding_tokens))


def _copies(c: Candidate) -> bool:
    """Return False also for workers of an earlier version, which would compute the prompt."""
    return c.info.kv is not None and c.info.kv.copies
