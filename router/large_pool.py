"""What a booking looks at of a large pool: some workers drawn for it, not all of them.

Filters and scores cost time for each worker, so that a decision would grow with the pool. Of each
role as many are drawn as are scored, and with them whoever holds most of the prompt's beginning:
every holder is looked at for that. Where those drawn cannot take a request, all are asked; and what
the roomiest could then take is kept, so that the next request of its size waits without another
look until a worker has changed.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pdserve.types import Role
from router.member import MemberState
from router.placement.pickers import MOST_CACHED, MOST_SCORED, mix
from router.placement.values import NO_TOKENS_CACHED
from router.prefill_queue import chunk_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from router.cost.book import CostBook
    from router.member import Member
    from router.placement.context import PrefixLookup
    from router.placement.values import Candidate, Demand
    from router.pool import WorkerPool
    from router.prefill_queue import PrefillQueue

# Smaller pools are looked at whole: a draw would save nothing.
LARGE = 4 * MOST_SCORED
# Of more holders, those with the most tokens are asked whether they are free.
MOST_HOLDERS = 256
# When more workers have changed since all were asked, all are asked again.
MOST_CHANGED = 64
# Each waiting request would ask for it with every prompt that ends.
LOCAL_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class _Shortage:
    """The most tokens that any ready worker took when all were asked, as a prompt and as KV, and
    whether all that decode would have kept their tokens too far apart with one request more; of a
    pool with these members."""

    members: Mapping[Role, Sequence[Member]]
    prompt_tokens: float
    kv_tokens: float
    is_full: bool


@dataclass(frozen=True, slots=True)
class Known:
    """A `PrefixLookup` that was asked already, for one demand."""

    cached: Mapping[str, int]

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        """As it was answered."""
        return self.cached


class LargePool:
    """State: for each model what was short when all of its workers were asked last,
    and when a decode worker was looked for to prefill on."""

    def __init__(
        self,
        pool: WorkerPool,
        queue: PrefillQueue,
        prefix: PrefixLookup | None,
        costs: CostBook | None,
        *,
        may_local: bool,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._prefix = prefix
        self._costs = costs
        self._may_local = may_local
        self._shortages: dict[str, _Shortage] = {}
        self._local_looks: dict[str, tuple[int, float]] = {}

    def is_large(self, model: str) -> bool:
        """Whether workers are drawn from the pool of a model."""
        return len(self._pool.of_model(model)) > LARGE

    def draw(self, demand: Demand, turn: int) -> tuple[list[Candidate], Known, int]:
        """Workers to place a demand on, what is cached of its prompt, and how many other workers
        there are. The draw follows from `turn`."""
        chance = Random(mix(turn))
        cached = NO_TOKENS_CACHED if self._prefix is None else self._prefix.cached_tokens(demand)
        drawn: dict[Member, None] = {}
        if cached:
            drawn = dict.fromkeys(self._holders(demand, cached))
        drawn |= dict.fromkeys(self._changed(demand.model) or ())
        known = Counter(m.info.role for m in drawn)
        for role, members in self._pool.by_role(demand.model).items():
            # No more than are scored, so that none of those that changed is left out.
            more = max(0, MOST_SCORED - known[role])
            drawn |= dict.fromkeys(chance.sample(members, more) if len(members) > more else members)
        others = len(self._pool.of_model(demand.model)) - len(drawn)
        return [m.seen() for m in drawn], Known(cached), others

    def _holders(self, demand: Demand, cached: Mapping[str, int]) -> Iterator[Member]:
        """Of each role those with most of the prompt that could be given it now."""
        names: Iterable[str] = cached
        if len(cached) > MOST_HOLDERS:
            names = heapq.nlargest(MOST_HOLDERS, cached, key=cached.__getitem__)
        found: dict[Role, list[Member]] = {role: [] for role in Role}
        for name in names:
            member = self._pool.members.get(name)
            if member is None or member.info.model.name != demand.model:
                continue
            if demand.prompt_tokens <= self._takes(member):
                found[member.info.role].append(member)
        for members in found.values():
            yield from heapq.nlargest(MOST_CACHED, members, key=lambda m: cached[m.worker_id])

    def lacks_room(self, demand: Demand) -> bool:
        """Whether it is known that no worker that decodes has the blocks now, or takes one more."""
        short, changed = self._shortages.get(demand.model), self._changed(demand.model)
        if short is None or changed is None or demand.prefill_only:
            return False
        if demand.kv_tokens <= short.kv_tokens and not short.is_full:
            return False
        return not any(
            demand.kv_tokens <= _room(m) and self._takes_one_more(demand, m) for m in changed
        )

    def lacks_prefill(self, demand: Demand) -> bool:
        """Whether it is known that no worker that prefills takes the prompt now."""
        short, changed = self._shortages.get(demand.model), self._changed(demand.model)
        if short is None or changed is None:
            return False
        return demand.prompt_tokens > short.prompt_tokens and not any(
            demand.prompt_tokens <= self._takes(m) for m in changed if _prefills(m)
        )

    def looks_local(self, model: str, turn: int, now: float) -> bool:
        """Whether to look for a decode worker to prefill on, where no other takes a prompt: once
        between two placements, or in a while; never where no policy would take it."""
        if not self._may_local:
            return False
        known_turn, at = self._local_looks.get(model, (-1, -math.inf))
        if turn == known_turn and now - at < LOCAL_AGAIN_S:
            return False
        self._local_looks[model] = turn, now
        return True

    def all_asked(self, demand: Demand) -> None:
        """All workers of its model were asked, and none could take a request."""
        model = demand.model
        roles = self._pool.by_role(model)
        members = [m for found in roles.values() for m in found]
        prompt_tokens = max((self._takes(m) for m in members if _prefills(m)), default=0.0)
        is_full = not any(
            self._takes_one_more(demand, m) for m in members if m.info.role is not Role.PREFILL
        )
        kv_tokens = max(map(_room, members))
        self._shortages[model] = _Shortage(roles, prompt_tokens, kv_tokens, is_full)
        self._pool.changed(model).clear()

    def _changed(self, model: str) -> set[Member] | None:
        """Since all were asked; None where too much has changed to say."""
        short, changed = self._shortages.get(model), self._pool.changed(model)
        if short is None:
            return None
        if short.members is not self._pool.by_role(model) or len(changed) > MOST_CHANGED:
            del self._shortages[model]
            return None
        return changed

    def _takes_one_more(self, demand: Demand, member: Member) -> bool:
        return self._costs is None or self._costs.takes_one_more(demand, member.seen())

    def _takes(self, member: Member) -> float:
        """The longest prompt that a worker is given now; decode workers take what they are told."""
        if member.state is not MemberState.READY:
            return 0.0
        ahead = self._queue.chunks_ahead
        if not (ahead and member.outstanding_tokens) or member.info.role is Role.DECODE:
            return math.inf
        return ahead * chunk_tokens(member.info) - member.outstanding_tokens


def _prefills(member: Member) -> bool:
    return member.info.role is not Role.DECODE


def _room(member: Member) -> float:
    """The most tokens whose KV a worker that decodes has room for; an empty one takes any."""
    if member.info.role is Role.PREFILL or member.state is not MemberState.READY:
        return 0.0
    taken = member.reserved_blocks + member.foreign_blocks
    return (member.info.total_blocks - taken) * member.info.block_size if taken else math.inf
