"""The frame that most policies share: filter, sample, score each phase by weights, pick the best.

Decode is placed first: every worker that can decode is scored together with the prefill worker that
would hand over to it, which is the best of those that can; an aggregated worker competes by the
mean of its own two scores. Where every pair is barred, a decode worker does both phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.types import Role
from router.placement.filters import eligible, unbarred
from router.placement.pairing import what_is_missing
from router.placement.pickers import Phase, best, many
from router.placement.scoreboard import Weighted, score
from router.placement.values import NO_TOKENS_CACHED, Decision, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.placement.context import PlacementContext
    from router.placement.filters import Eligible
    from router.placement.pickers import Sampler
    from router.placement.scoreboard import Scoreboard
    from router.placement.values import Candidate, Demand


@dataclass(frozen=True, slots=True)
class Rules:
    """What tells one policy of this frame from another. With `by_prefix` the scorers are told what
    is cached of the prompt."""

    name: str
    decode: Weighted = field(default_factory=Weighted)
    prefill: Weighted = field(default_factory=Weighted)
    sample: Sampler = many
    by_prefix: bool = False


@dataclass(slots=True)
class _Choice:
    placement: Placement | None
    decode: Scoreboard | None = None
    prefill: Scoreboard | None = None
    totals: Mapping[Candidate, float] = field(default_factory=dict)


def place(
    rules: Rules,
    candidates: Sequence[Candidate],
    demand: Demand,
    turn: int,
    context: PlacementContext,
) -> Decision:
    """The decision of a policy that is told by its rules alone. Raises Unavailable where waiting
    would not help."""
    found = eligible(candidates, demand)
    cached = NO_TOKENS_CACHED
    asked_prefix = rules.by_prefix and context.prefix is not None
    if rules.by_prefix and context.prefix is not None:
        cached = context.prefix.cached_tokens(demand)
    choose = _choose_one if demand.prefill_only else _choose_pair
    choice = choose(rules, found, demand, turn, cached)
    return Decision(
        rules.name,
        candidates,
        demand,
        turn,
        choice.placement,
        choice.decode,
        choice.prefill,
        choice.totals,
        cached,
        asked_prefix=asked_prefix,
    )


def _choose_one(
    rules: Rules, found: Eligible, demand: Demand, turn: int, cached: Mapping[str, int]
) -> _Choice:
    """One token is wanted: no decode worker, no transfer."""
    if not found.prefills and not found.aggregated:
        raise Unavailable(f"no prefill worker is ready for model {demand.model}")
    roomy = [c for c in found.aggregated if c.has_room(demand.kv_tokens)]
    tried = rules.sample(found.prefills + roomy, turn, Phase.PREFILL, cached)
    if not tried:
        return _Choice(None)
    board = score(tried, rules.prefill, demand, cached)
    return _Choice(Placement(best(board.totals, tried, turn)), prefill=board, totals=board.totals)


def _choose_pair(
    rules: Rules, found: Eligible, demand: Demand, turn: int, cached: Mapping[str, int]
) -> _Choice:
    if not found.sources and not found.aggregated:
        raise Unavailable(what_is_missing(demand.model, found.prefills, found.decodes))
    roomy = found.roomy(demand.kv_tokens)
    if not roomy:
        return _Choice(None)
    may_take, barred_to = _reachable(found, roomy, demand)
    tried = rules.sample(may_take, turn, Phase.DECODE, cached)
    if not tried:
        drawn = rules.sample(roomy, turn, Phase.DECODE, cached)
        board = score(drawn, rules.decode, demand, cached)
        return _Choice(Placement(best(board.totals, drawn, turn)), board, totals=board.totals)
    # Workers of one kind share one list of givers, which is sampled, scored and picked from once.
    lists: dict[object, list[Candidate]] = {}
    key_of = {c: c if c in barred_to else c.kind for c in tried if not _is_whole(c)}
    for c, key in key_of.items():
        if key not in lists:
            lists[key] = barred_to[c] if c in barred_to else found.givers(c)
    offers = {k: rules.sample(listed, turn, Phase.PREFILL, cached) for k, listed in lists.items()}
    firsts = list(dict.fromkeys(c for offer in offers.values() for c in offer))
    prefill = score(firsts + [c for c in tried if _is_whole(c)], rules.prefill, demand, cached)
    partner = {key: best(prefill.totals, offer, turn) for key, offer in offers.items()}
    first = {c: c if _is_whole(c) else partner[key_of[c]] for c in tried}
    decode = score(tried, rules.decode, demand, cached)
    totals = {c: (decode.totals[c] + prefill.totals[first[c]]) / 2 for c in tried}
    chosen = best(totals, tried, turn)
    handed_over_by = None if first[chosen] is chosen else first[chosen]
    return _Choice(Placement(chosen, handed_over_by), decode, prefill, totals)


def _is_whole(candidate: Candidate) -> bool:
    return candidate.role is Role.AGGREGATED


def _reachable(
    found: Eligible, roomy: list[Candidate], demand: Demand
) -> tuple[list[Candidate], dict[Candidate, list[Candidate]]]:
    """Those of `roomy` that some prefill worker may hand KV to, or that need none; and for decode
    workers that a quarantine keeps from some, the others."""
    if not demand.barred:
        return roomy, {}
    apart = {decode for _, decode in demand.barred}
    barred_to = {
        c: unbarred(found.givers(c), c, demand.barred)
        for c in roomy
        if c.worker_id in apart and not _is_whole(c)
    }
    return [c for c in roomy if barred_to.get(c) != []], barred_to
