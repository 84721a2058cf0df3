"""Why a decision passed candidates over, in words. Made when somebody asks: filters are pure, so
they say again what they said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.types import Role
from router.fleet.member import MemberState
from router.placement import live, recompute
from router.placement.filters import able, eligible, prefer, unbarred

if TYPE_CHECKING:
    from router.placement.filters import Eligible
    from router.placement.values import Candidate, Decision, Demand


_PASSED_OVER = {
    recompute.NAME: "one that decodes comes first",
    recompute.ALONE: "one that decodes comes first",
    live.NAME: "cannot decode with the KV that is there",
}


def why_not(decision: Decision) -> dict[str, str]:
    """By worker id, for each candidate that was not scored."""
    demand = decision.demand
    scored = {c for b in (decision.prefill, decision.decode) if b is not None for c in b.candidates}
    is_alone = decision.policy in _PASSED_OVER
    passed_over = _PASSED_OVER.get(decision.policy, "not drawn")
    left = able(decision.candidates, demand)
    preferred = set(prefer(left, demand.avoid))
    found = eligible(decision.candidates, demand)
    reasons = {}
    for c in decision.candidates:
        if c in scored:
            continue
        reason = _not_able(c, demand) or ("to be avoided" if c not in preferred else "")
        if not reason and not is_alone:
            reason = _not_paired(c, found, demand)
        if not reason and decision.policy in (recompute.ALONE, live.NAME):
            reason = _no_room(c, demand)
        reasons[c.worker_id] = reason or passed_over
    return reasons


def _not_able(candidate: Candidate, demand: Demand) -> str:
    if candidate.state is not MemberState.READY:
        return f"{candidate.state}"
    if candidate.capacity_tokens <= demand.prompt_tokens:
        return f"holds {candidate.capacity_tokens} tokens, the prompt alone {demand.prompt_tokens}"
    return ""


def _not_paired(candidate: Candidate, found: Eligible, demand: Demand) -> str:
    """Of one that is eligible: its phase, its partners, its room."""
    if demand.prefill_only:
        return "one token needs no decode" if candidate.role is Role.DECODE else ""
    if candidate.role is Role.PREFILL:
        return _not_giving(candidate, found, demand)
    if candidate.role is Role.DECODE and candidate.kind not in found.sources:
        return "no prefill worker can hand KV to it"
    if no_room := _no_room(candidate, demand):
        return no_room
    if candidate.role is Role.DECODE and not unbarred(
        found.givers(candidate), candidate, demand.barred
    ):
        return "every pair with it is quarantined"
    return ""


def _no_room(candidate: Candidate, demand: Demand) -> str:
    if candidate.role is Role.PREFILL or candidate.has_room(demand.kv_tokens):
        return ""
    taken, total = candidate.reserved_blocks, candidate.info.total_blocks
    return f"no room: {taken} of {total} blocks are promised, {demand.kv_tokens} tokens asked"


def _not_giving(candidate: Candidate, found: Eligible, demand: Demand) -> str:
    receivers = [c for c in found.decodes if candidate.kind in found.sources.get(c.kind, ())]
    if not receivers:
        return "it can hand KV to no decode worker"
    roomy = [c for c in receivers if c.has_room(demand.kv_tokens)]
    if not roomy:
        return "no decode worker that it can hand KV to has room"
    if all((candidate.worker_id, c.worker_id) in demand.barred for c in roomy):
        return "every pair with it is quarantined"
    return ""
