"""Filters: which workers can serve a demand, and in words why others cannot.

In this order: ready; large enough for the prompt and a token; not to be avoided, unless its role
would have no other worker; able to exchange KV with a worker of the other phase; KV blocks free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ModelNotFound, PdserveError, Unavailable
from pdserve.kv_pairs import exchange, unpaired
from pdserve.types import Role
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.kv_pairs import KvKind
    from router.placement.values import Candidate, Decision, Demand

AGGREGATED = "aggregated"
LIVE_KV = "live_kv"

_MAX_REASONS = 3


@dataclass(slots=True)
class Eligible:
    """Ready and large enough workers by role."""

    prefills: list[Candidate]
    decodes: list[Candidate]
    aggregated: list[Candidate]
    excluded: frozenset[tuple[str, str]]
    _by_kind: dict[KvKind, list[Candidate]] = field(default_factory=dict)

    def producers(self, decode: Candidate) -> list[Candidate]:
        """Return the prefill workers that can give KV to `decode`, excluded pairs too. Decode
        workers of one kind get the same list."""
        found = self._by_kind.get(decode.kind)
        if found is None:
            found = [c for c in self.prefills if exchange(c.kind, decode.kind)]
            self._by_kind[decode.kind] = found
        return found

    def allowed_producers(self, decode: Candidate) -> list[Candidate]:
        """Return `producers` without excluded pairs."""
        found = self.producers(decode)
        if not self.excluded or all(decode.worker_id != name for _, name in self.excluded):
            return found
        return [c for c in found if (c.worker_id, decode.worker_id) not in self.excluded]

    @property
    def has_pair(self) -> bool:
        return any(self.producers(c) for c in self.decodes)

    def with_room(self, tokens: int) -> list[Candidate]:
        """Return the workers that can decode, get KV from somewhere, and have free blocks."""
        decodes = [c for c in self.decodes if self.producers(c)]
        return [c for c in (*decodes, *self.aggregated) if c.has_room(tokens)]


def eligible(candidates: Sequence[Candidate], demand: Demand) -> Eligible:
    kept = prefer(able(candidates, demand), demand.avoid)
    return Eligible(
        [c for c in kept if c.role is Role.PREFILL],
        [c for c in kept if c.role is Role.DECODE],
        [c for c in kept if c.role is Role.AGGREGATED],
        demand.excluded,
    )


def able(candidates: Sequence[Candidate], demand: Demand) -> list[Candidate]:
    """Return the ready workers that could hold the prompt and a token if they were idle."""
    least = demand.prompt_tokens
    return [c for c in candidates if c.state is MemberState.READY and c.capacity_tokens > least]


def prefer(candidates: list[Candidate], avoid: frozenset[str]) -> list[Candidate]:
    """Remove the workers to avoid, except from roles that would have no worker left."""
    if not avoid:
        return candidates
    kept = [c for c in candidates if c.worker_id not in avoid]
    kept_roles = {c.role for c in kept}
    return kept + [c for c in candidates if c.worker_id in avoid and c.role not in kept_roles]


def no_workers(model: str, others: Iterable[str]) -> PdserveError:
    """Return the error for a model without workers; `others` are the models that have some."""
    if names := ", ".join(sorted(others)):
        text = f"model {model} is not served here; served are: {names}"
        return ModelNotFound(text, field="model")
    return Unavailable("no worker is registered")


def check_servable(
    candidates: Sequence[Candidate], model: str, *, aggregated: bool = False
) -> None:
    """Raise Unavailable, naming what is missing, unless an idle pool of the ready workers could
    serve `model`: with `aggregated` on one worker of any role."""
    ready = [c for c in candidates if c.state is MemberState.READY]
    if (ready and aggregated) or any(c.role is Role.AGGREGATED for c in ready):
        return
    prefills = [c for c in ready if c.role is Role.PREFILL]
    decodes = [c for c in ready if c.role is Role.DECODE]
    if not any(exchange(p.kind, d.kind) for p in prefills for d in decodes):
        raise Unavailable(what_is_missing(model, prefills, decodes))


def with_states(error: Unavailable, candidates: Iterable[Candidate]) -> Unavailable:
    """Return `error` with the states of the workers that are not ready."""
    others = [c for c in candidates if c.state is not MemberState.READY]
    if not others:
        return error
    said = ", ".join(f"{c.worker_id} is {c.state}" for c in others[:_MAX_REASONS])
    more = len(others) - _MAX_REASONS
    text = f"{error.message}: {said}" + (f" and {more} more are not ready" if more > 0 else "")
    return Unavailable(text, retry_after_s=error.retry_after_s, reason=error.reason)


def what_is_missing(model: str, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> str:
    """Say why no pair of these workers can serve `model`."""
    if prefills and decodes:
        pairs = list(unpaired(c.info for c in (*prefills, *decodes)))
        reasons = " | ".join(pair.reason for pair in pairs[:_MAX_REASONS])
        more = len(pairs) - _MAX_REASONS
        return (
            f"no decode worker for model {model} can receive KV from a prefill worker: {reasons}"
            + (f" | and {more} more pairs" if more > 0 else "")
        )
    roles = [role for role, found in (("prefill", prefills), ("decode", decodes)) if not found]
    return f"no {' and no '.join(f'{role} worker' for role in roles)} is ready for model {model}"


_NOT_TRIED = {
    AGGREGATED: "workers that decode are used first",
    LIVE_KV: "cannot decode with the live KV",
}


def why_not(decision: Decision) -> dict[str, str]:
    """Say, by worker id, why each candidate that was not scored was not."""
    demand = decision.demand
    boards = (decision.prefill, decision.decode)
    scored = {c for board in boards if board is not None for c in board.candidates}
    preferred = set(prefer(able(decision.candidates, demand), demand.avoid))
    found = eligible(decision.candidates, demand)
    reasons = {}
    for candidate in decision.candidates:
        if candidate in scored:
            continue
        reason = _not_able(candidate, demand)
        if not reason and candidate not in preferred:
            reason = "to be avoided"
        if not reason and decision.policy in _NOT_TRIED:
            reason = _no_room(candidate, demand)
        elif not reason:
            reason = _not_paired(candidate, found, demand)
        reasons[candidate.worker_id] = reason or _NOT_TRIED.get(decision.policy, "not drawn")
    return reasons


def _not_able(candidate: Candidate, demand: Demand) -> str:
    if candidate.state is not MemberState.READY:
        return f"{candidate.state}"
    if candidate.capacity_tokens <= demand.prompt_tokens:
        return (
            f"holds {candidate.capacity_tokens} tokens, the prompt alone has {demand.prompt_tokens}"
        )
    return ""


def _not_paired(candidate: Candidate, found: Eligible, demand: Demand) -> str:
    if demand.prefill_only:
        return "one token needs no decode" if candidate.role is Role.DECODE else ""
    if candidate.role is Role.PREFILL:
        return _not_producer(candidate, found, demand)
    if candidate.role is Role.DECODE and not found.producers(candidate):
        return "no prefill worker can give KV to it"
    if no_room := _no_room(candidate, demand):
        return no_room
    if candidate.role is Role.DECODE and not found.allowed_producers(candidate):
        return "every pair with it is ejected"
    return ""


def _not_producer(candidate: Candidate, found: Eligible, demand: Demand) -> str:
    consumers = [c for c in found.decodes if candidate in found.producers(c)]
    if not consumers:
        return "it can give KV to no decode worker"
    roomy = [c for c in consumers if c.has_room(demand.kv_tokens)]
    if not roomy:
        return "no decode worker that it can give KV to has room"
    if all((candidate.worker_id, c.worker_id) in demand.excluded for c in roomy):
        return "every pair with it is ejected"
    return ""


def _no_room(candidate: Candidate, demand: Demand) -> str:
    if candidate.role is Role.PREFILL or candidate.has_room(demand.kv_tokens):
        return ""
    taken, total = candidate.reserved_blocks, candidate.info.total_blocks
    return f"no room: {taken} of {total} blocks are reserved, {demand.kv_tokens} tokens needed"
