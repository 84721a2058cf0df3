"""Filters: select the workers that can serve a demand, and report why the others cannot.

A worker must, in this order: be ready; be in a region where the request may be; hold the prompt and
one token; have the LoRA adapter loaded;
not be in `without`; not be in `avoid`, unless the role has no other worker; exchange KV with a
worker of the other phase; have free KV blocks and a free slot for the adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.errors import Refusal, Unavailable
from pdserve.kv_compatibility import exchange, unpaired
from pdserve.types import Role
from router.placement.values import MemberState, may_hold, shown_regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.kv_compatibility import KvKind
    from router.placement.values import Candidate, Decision, Demand

AGGREGATED = "aggregated"
LIVE_KV = "live_kv"

# Largest number of reasons in one error, which a large fleet would make unreadable.
_MAX_REASONS = 3


class Eligible(Struct):
    """Workers by role that are ready and large enough."""

    prefills: list[Candidate]
    decodes: list[Candidate]
    aggregated: list[Candidate]
    excluded: frozenset[tuple[str, str]]
    _by_kind: dict[KvKind, list[Candidate]] = {}

    def producers(self, decode: Candidate) -> list[Candidate]:
        """Return the prefill workers that can send KV to `decode`, including excluded pairs.

        Decode workers of one kind share one list object, which is computed and sampled once.
        """
        found = self._by_kind.get(decode.kind)
        if found is None:
            found = [c for c in self.prefills if exchange(c.kind, decode.kind)]
            self._by_kind[decode.kind] = found
        return found

    def allowed_producers(self, decode: Candidate) -> list[Candidate]:
        """Return `producers(decode)` without excluded pairs."""
        found = self.producers(decode)
        # The shared list itself, unless a pair of this worker is excluded: policies sample once for
        # all decode workers with the same list.
        if not self.excluded or all(decode.worker_id != name for _, name in self.excluded):
            return found
        return [c for c in found if (c.worker_id, decode.worker_id) not in self.excluded]

    @property
    def has_pair(self) -> bool:
        return any(self.producers(c) for c in self.decodes)

    def with_room(self, demand: Demand) -> list[Candidate]:
        """Return the workers with room that can decode and, if they need one, have a KV
        producer."""
        decodes = [c for c in self.decodes if self.producers(c)]
        return [c for c in (*decodes, *self.aggregated) if c.has_room(demand)]


def eligible(candidates: Sequence[Candidate], demand: Demand) -> Eligible:
    found = Eligible([], [], [], demand.excluded)
    lists = {
        Role.PREFILL: found.prefills,
        Role.DECODE: found.decodes,
        Role.AGGREGATED: found.aggregated,
    }
    for c in prefer(feasible(candidates, demand), demand.avoid):
        lists[c.role].append(c)
    return found


def feasible(candidates: Sequence[Candidate], demand: Demand) -> list[Candidate]:
    """Return the ready workers that, if idle, could run the prompt and one token."""
    least, adapter, without = demand.prompt_tokens, demand.adapter, demand.without
    regions = demand.regions
    return [
        c
        for c in candidates
        if c.state is MemberState.READY
        and (regions is None or may_hold(regions, c.info.topology))
        and c.capacity_tokens > least
        and (not adapter or adapter in c.adapters)
        and (not without or c.worker_id not in without)
    ]


def prefer(candidates: list[Candidate], avoid: frozenset[str]) -> list[Candidate]:
    """Return `candidates` without the workers in `avoid`, unless a role has no others."""
    if not avoid:
        return candidates
    kept_roles = {c.role for c in candidates if c.worker_id not in avoid}
    return [c for c in candidates if c.worker_id not in avoid or c.role not in kept_roles]


def check_servable(
    candidates: Sequence[Candidate], model: str, *, aggregated: bool = False
) -> None:
    """Raise Unavailable, naming what is missing, unless the ready workers could serve `model` if
    idle. With `aggregated`, one ready worker of any role is enough."""
    ready = [c for c in candidates if c.state is MemberState.READY]
    # Every engine can run both phases, also on a prefill worker.
    if (ready and aggregated) or any(c.role is Role.AGGREGATED for c in ready):
        return
    prefills = [c for c in ready if c.role is Role.PREFILL]
    decodes = [c for c in ready if c.role is Role.DECODE]
    if not any(exchange(p.kind, d.kind) for p in prefills for d in decodes):
        raise Unavailable(what_is_missing(f"model {model}", prefills, decodes))


def what_is_missing(
    wanted: str, prefills: Sequence[Candidate], decodes: Sequence[Candidate]
) -> str:
    """Return a sentence that says why no pair of these workers can serve `wanted`."""
    if prefills and decodes:
        reasons = [pair.reason for pair in unpaired(c.info for c in (*prefills, *decodes))]
        text = _some(reasons, " | ", "{} more pairs")
        return f"no decode worker for {wanted} can receive KV from a prefill worker: {text}"
    roles = [role for role, found in (("prefill", prefills), ("decode", decodes)) if not found]
    return f"no {' and no '.join(f'{role} worker' for role in roles)} is ready for {wanted}"


def with_states(error: Unavailable, candidates: Iterable[Candidate], demand: Demand) -> Unavailable:
    """Return `error` with the states of the workers that are not ready where the request may be."""
    regions, text = demand.regions, error.message
    others = [
        f"{c.worker_id} is {c.state}"
        for c in candidates
        if c.state is not MemberState.READY and may_hold(regions, c.info.topology)
    ]
    if not others and regions is None:
        return error
    if others:
        text = f"{text}: {_some(others, ', ', '{} more are not ready')}"
    reason = error.reason if regions is None else Refusal.NO_WORKER_IN_REGION
    return Unavailable(text, retry_after_s=error.retry_after_s, reason=reason)


def _some(parts: list[str], separator: str, rest: str) -> str:
    """Join the first parts and append the number of the others."""
    text, more = separator.join(parts[:_MAX_REASONS]), len(parts) - _MAX_REASONS
    glue = " " if separator == ", " else separator
    return text if more <= 0 else f"{text}{glue}and {rest.format(more)}"


_NOT_TRIED = {
    AGGREGATED: "workers that decode are used first",
    LIVE_KV: "cannot decode with the live KV",
}


def why_not(decision: Decision) -> dict[str, str]:
    """Return, by worker id, why each candidate without a score was not considered.

    Derived when `explain` asks for it, so that placements do not spend time on the texts.
    """
    boards = (decision.prefill, decision.decode)
    scored = {c for board in boards if board is not None for c in board.candidates}
    # Filtered again: the decision keeps its inputs, and filters depend on nothing else.
    found = eligible(decision.candidates, decision.demand)
    return {
        c.worker_id: _reason(c, decision, found) for c in decision.candidates if c not in scored
    }


def _reason(candidate: Candidate, decision: Decision, found: Eligible) -> str:
    demand, capacity = decision.demand, candidate.capacity_tokens
    if candidate.state is not MemberState.READY:
        return f"{candidate.state}"
    if demand.regions is not None and not may_hold(demand.regions, candidate.info.topology):
        region = candidate.info.topology.get("region")
        place = f"it is in region {region}" if region else "it has no region"
        return f"{place}, and the request may be in {shown_regions(demand.regions)} alone"
    if capacity <= demand.prompt_tokens:
        return f"holds {capacity} tokens, the prompt alone has {demand.prompt_tokens}"
    if demand.adapter and demand.adapter not in candidate.adapters:
        return f"adapter {demand.adapter} is not loaded"
    if candidate.worker_id in demand.without:
        return "excluded: failed this request, its rank group is ending, or it runs another suspect"
    if candidate not in (*found.prefills, *found.decodes, *found.aggregated):
        return "to be avoided"
    full = ""
    if candidate.role is Role.PREFILL:
        pass  # it reserves no blocks, so it is never full
    elif not candidate.can_run(demand.adapter):
        most = candidate.info.limits.max_loras
        full = f"as many other adapters run there as max_loras ({most}) allows"
    elif not candidate.has_room(demand):
        taken, total = candidate.reserved_blocks, candidate.info.total_blocks
        full = f"no room: {taken} of {total} blocks are reserved, {demand.kv_tokens} tokens needed"
    if decision.policy in _NOT_TRIED:
        return full or _NOT_TRIED[decision.policy]
    if demand.prefill_only:
        return "one token needs no decode" if candidate.role is Role.DECODE else full or "not drawn"
    return full or _unpaired_reason(candidate, found, demand) or "not drawn"


def _unpaired_reason(candidate: Candidate, found: Eligible, demand: Demand) -> str:
    pairs = []
    if candidate.role is Role.DECODE:
        pairs = [(c, candidate) for c in found.producers(candidate)]
        if not pairs:
            return "no prefill worker can give KV to it"
    elif candidate.role is Role.PREFILL:
        pairs = [(candidate, c) for c in found.decodes if candidate in found.producers(c)]
        if not pairs:
            return "it can give KV to no decode worker"
        pairs = [(p, d) for p, d in pairs if d.has_room(demand)]
        if not pairs:
            return "no decode worker that it can give KV to has room"
    names = {(p.worker_id, d.worker_id) for p, d in pairs}
    return "every pair with it is ejected" if names and names <= demand.excluded else ""
