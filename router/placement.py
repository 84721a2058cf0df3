"""Placement: which workers serve a request. Pure functions of the members' state.

Candidates are filtered (model, ready, room), scored in [0, 1], and the best is picked; equal ones
take turns. What this router has placed itself is always known; what a worker reports may not be.
A load that is not known scores as the mean of those that are, never as an idle worker's, and 0.5
where none is; the router's own account is then what tells workers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ModelNotFound, Unavailable
from pdserve.kv_pairs import exchange, kind_of, unpaired
from pdserve.types import Role

if TYPE_CHECKING:
    from pdserve.kv_pairs import KvKind
    from router.pool import Member

UNKNOWN = 0.5
# Decode is slowed by a full KV cache (preemption) and by a large batch alike.
DECODE_ROOM_WEIGHT = 0.5
# What this router placed is exact; what waits in an engine is as old as its last report.
PREFILL_OUTSTANDING_WEIGHT = 0.8
_MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the pool, in tokens. `prefill_only` asks for one token alone; `barred`
    are pairs (prefill, decode) that must not exchange KV now."""

    model: str
    prompt_tokens: int
    kv_tokens: int
    prefill_only: bool = False
    avoid: frozenset[str] = frozenset()
    barred: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. Without `prefill`, `decode` does both phases."""

    decode: Member
    prefill: Member | None = None


# A policy places a demand among the members of its model: `turn` counts placements and breaks ties.
# None means that room must be waited for. Raises Unavailable where waiting would not help.
Policy = Callable[[Sequence["Member"], Demand, int], Placement | None]


def least_loaded(members: Sequence[Member], demand: Demand, turn: int) -> Placement | None:
    """Prefill where the fewest prompt tokens are outstanding, decode where KV and seats are free;
    an aggregated worker competes with the pairs by the mean of its two scores. Where every pair is
    barred, a decode worker does both phases."""
    ready = _prefer(_able(members, demand), demand.avoid)
    aggregated = [m for m in ready if m.info.role is Role.AGGREGATED]
    prefills = [m for m in ready if m.info.role is Role.PREFILL]
    decodes = [m for m in ready if m.info.role is Role.DECODE]
    if demand.prefill_only:
        return _place_prefill_only(prefills, aggregated, demand, turn)
    sources = _sources(prefills, decodes)
    if not sources and not aggregated:
        raise Unavailable(_what_is_missing(demand.model, prefills, decodes))
    partnered = {kind for kinds in sources.values() for kind in kinds}
    prefills = [m for m in prefills if kind_of(m.info) in partnered]
    roomy = [
        m
        for m in (*decodes, *aggregated)
        if m.has_room(demand.kv_tokens)
        and (m.info.role is Role.AGGREGATED or kind_of(m.info) in sources)
    ]
    if not roomy:
        return None
    decode_score = dict(zip(roomy, decode_scores(roomy), strict=True))
    firsts = [*prefills, *(m for m in roomy if m.info.role is Role.AGGREGATED)]
    prefill_score = dict(zip(firsts, prefill_scores(firsts, demand.prompt_tokens), strict=True))
    partner = {
        kind: _pick([m for m in prefills if kind_of(m.info) in kinds], prefill_score, turn)
        for kind, kinds in sources.items()
    }
    first = {m: m if m.info.role is Role.AGGREGATED else partner[kind_of(m.info)] for m in roomy}
    if demand.barred:
        first = _without_barred(first, sources, prefill_score, demand, turn)
        if not first:
            return Placement(_pick(roomy, decode_score, turn))
    total = {m: (decode_score[m] + prefill_score[first[m]]) / 2 for m in first}
    chosen = _pick(list(first), total, turn)
    return Placement(chosen, None if first[chosen] is chosen else first[chosen])


def _without_barred(
    first: dict[Member, Member],
    sources: dict[KvKind, set[KvKind]],
    prefill_score: dict[Member, float],
    demand: Demand,
    turn: int,
) -> dict[Member, Member]:
    """`first`, where barred partners gave way to the next best; without those that have none."""
    kept = {}
    for member, partner in first.items():
        if (partner.worker_id, member.worker_id) not in demand.barred:
            kept[member] = partner
            continue
        others = [
            p
            for p in prefill_score
            if kind_of(p.info) in sources[kind_of(member.info)]
            and p.info.role is Role.PREFILL
            and (p.worker_id, member.worker_id) not in demand.barred
        ]
        if others:
            kept[member] = _pick(others, prefill_score, turn)
    return kept


def _place_prefill_only(
    prefills: list[Member], aggregated: list[Member], demand: Demand, turn: int
) -> Placement | None:
    """One token is wanted: no decode worker, no transfer."""
    if not prefills and not aggregated:
        raise Unavailable(f"no prefill worker is ready for model {demand.model}")
    candidates = [*prefills, *(m for m in aggregated if m.has_room(demand.kv_tokens))]
    if not candidates:
        return None
    scores = dict(zip(candidates, prefill_scores(candidates, demand.prompt_tokens), strict=True))
    return Placement(_pick(candidates, scores, turn))


def place_recompute(members: Sequence[Member], demand: Demand, turn: int) -> Member:
    """The worker that goes on with a request from its tokens alone: one that decodes, else one that
    prefills. Room is not waited for: the request has been admitted, and its client is reading.

    Raises Unavailable where no worker of the model is ready.
    """
    ready = _able(members, demand)
    for roles in ((Role.DECODE, Role.AGGREGATED), (Role.PREFILL,)):
        candidates = _prefer([m for m in ready if m.info.role in roles], demand.avoid)
        if candidates:
            return _pick(
                candidates, dict(zip(candidates, decode_scores(candidates), strict=True)), turn
            )
    raise Unavailable(f"no worker is ready for model {demand.model}")


def check_servable(members: Sequence[Member], model: str) -> None:
    """Raises Unavailable, naming what is missing, unless `model` can be placed on an idle pool."""
    ready = [member for member in members if member.is_ready]
    if any(m.info.role is Role.AGGREGATED for m in ready):
        return
    prefills = [m for m in ready if m.info.role is Role.PREFILL]
    decodes = [m for m in ready if m.info.role is Role.DECODE]
    if not _sources(prefills, decodes):
        raise Unavailable(_what_is_missing(model, prefills, decodes))


def check_known(members: Sequence[Member], model: str, *, others: Iterable[str]) -> None:
    """Raises ModelNotFound where workers serve other models alone, Unavailable where there are no
    workers at all."""
    if members:
        return
    names = ", ".join(sorted(others))
    if names:
        raise ModelNotFound(f"model {model} is not served here; served are: {names}", field="model")
    raise Unavailable("no worker is registered")


def _sources(prefills: list[Member], decodes: list[Member]) -> dict[KvKind, set[KvKind]]:
    """For each kind of decode worker that can have KV at all, the kinds that can give it some."""
    givers = {kind_of(m.info) for m in prefills}
    found = {
        kind: {giver for giver in givers if exchange(giver, kind)}
        for kind in {kind_of(m.info) for m in decodes}
    }
    return {kind: kinds for kind, kinds in found.items() if kinds}


def decode_scores(members: Sequence[Member]) -> list[float]:
    """1 for a worker with all blocks and seats free. Blocks promised by this router count as taken
    although no request may have reached them yet."""
    reported_room = _fill(
        [None if m.load is None else m.load.free_blocks / m.info.total_blocks for m in members]
    )
    reported_seats = _fill(
        [
            None
            if m.load is None
            else 1 - (m.load.num_running_reqs + m.load.num_waiting_reqs) / m.info.max_num_seqs
            for m in members
        ]
    )
    scores = []
    for member, room, seats in zip(members, reported_room, reported_seats, strict=True):
        own_room = 1 - member.reserved_blocks / member.info.total_blocks
        own_seats = 1 - member.outstanding_requests / member.info.max_num_seqs
        scores.append(
            DECODE_ROOM_WEIGHT * max(0.0, min(own_room, room))
            + (1 - DECODE_ROOM_WEIGHT) * max(0.0, min(own_seats, seats))
        )
    return scores


def prefill_scores(members: Sequence[Member], prompt_tokens: int) -> list[float]:
    """1 for a worker without outstanding prompt tokens and without waiting requests."""
    most = max((m.outstanding_tokens for m in members), default=0) + max(1, prompt_tokens)
    waiting = _fill(
        [None if m.load is None else 1 / (1 + m.load.num_waiting_reqs) for m in members]
    )
    return [
        PREFILL_OUTSTANDING_WEIGHT * (1 - m.outstanding_tokens / most)
        + (1 - PREFILL_OUTSTANDING_WEIGHT) * quiet
        for m, quiet in zip(members, waiting, strict=True)
    ]


def _fill(values: list[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    neutral = sum(known) / len(known) if known else UNKNOWN
    return [neutral if value is None else value for value in values]


def _able(members: Sequence[Member], demand: Demand) -> list[Member]:
    """Those that are ready and could hold the prompt and a token, were they empty."""
    return [m for m in members if m.is_ready and m.capacity_tokens > demand.prompt_tokens]


def _prefer(members: list[Member], avoid: frozenset[str]) -> list[Member]:
    """Without those to avoid, role by role, unless a role would be left without any."""
    if not avoid:
        return members
    kept = [m for m in members if m.worker_id not in avoid]
    kept_roles = {m.info.role for m in kept}
    return kept + [m for m in members if m.worker_id in avoid and m.info.role not in kept_roles]


def _pick(members: Sequence[Member], scores: dict[Member, float], turn: int) -> Member:
    best = max(scores[m] for m in members)
    # Scores are sums of ratios: equal states may differ in the last bit.
    equals = [m for m in members if best - scores[m] < 1e-9]
    return equals[turn % len(equals)]


def _what_is_missing(model: str, prefills: list[Member], decodes: list[Member]) -> str:
    if prefills and decodes:
        pairs = list(unpaired(m.info for m in (*prefills, *decodes)))
        reasons = " | ".join(pair.reason for pair in pairs[:_MAX_REASONS])
        more = len(pairs) - _MAX_REASONS
        return (
            f"no decode worker for model {model} can receive KV from a prefill worker: {reasons}"
            + (f" | and {more} more pairs" if more > 0 else "")
        )
    roles = [role for role, found in (("prefill", prefills), ("decode", decodes)) if not found]
    return f"no {' and no '.join(f'{role} worker' for role in roles)} is ready for model {model}"
