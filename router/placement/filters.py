"""Filters: which workers may serve a demand at all. Each is asked in this order.

ready    attached, not draining, not lost
able     could hold the prompt and a token, were it empty
avoid    not one to avoid, unless its role would be left without any
pairing  can exchange KV with a worker of the other phase
room     has the blocks for prompt and answer; where none has, the request waits
barred   has a partner that no quarantine keeps from it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.types import Role
from router.fleet.member import MemberState
from router.placement.pairing import sources_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kv_pairs import KvKind
    from router.placement.values import Candidate, Demand

_READY = MemberState.READY
_PREFILL, _DECODE, _AGGREGATED = Role.PREFILL, Role.DECODE, Role.AGGREGATED


@dataclass(slots=True)
class Eligible:
    """Those that passed ready, able and avoid, by role. `sources` are, for each kind of decode
    worker that can have KV at all, the kinds that can give it some; `giving` and `taking` all kinds
    of each role."""

    prefills: list[Candidate]
    decodes: list[Candidate]
    aggregated: list[Candidate]
    giving: set[KvKind]
    taking: set[KvKind]
    sources: dict[KvKind, set[KvKind]]

    def roomy(self, tokens: int) -> list[Candidate]:
        """Those that can decode, have a source of KV where they need one, and room."""
        decodes, sources = self.decodes, self.sources
        if len(sources) < len(self.taking):
            decodes = [c for c in decodes if c.kind in sources]
        return [c for c in (*decodes, *self.aggregated) if c.has_room(tokens)]

    def givers(self, receiver: Candidate) -> list[Candidate]:
        """The prefill workers that can hand KV to one of `decodes`."""
        kinds = self.sources.get(receiver.kind, set())
        if kinds == self.giving:
            return self.prefills
        return [c for c in self.prefills if c.kind in kinds]


def eligible(candidates: Sequence[Candidate], demand: Demand) -> Eligible:
    """Filters ready, able, avoid; and who can be paired."""
    kept = prefer(able(candidates, demand), demand.avoid)
    prefills = [c for c in kept if c.role is _PREFILL]
    decodes = [c for c in kept if c.role is _DECODE]
    others = len(kept) > len(prefills) + len(decodes)
    aggregated = [c for c in kept if c.role is _AGGREGATED] if others else []
    giving, taking = {c.kind for c in prefills}, {c.kind for c in decodes}
    return Eligible(prefills, decodes, aggregated, giving, taking, sources_of(giving, taking))


def able(candidates: Sequence[Candidate], demand: Demand) -> list[Candidate]:
    """Those that are ready and could hold the prompt and a token, were they empty."""
    least = demand.prompt_tokens
    return [c for c in candidates if c.state is _READY and c.capacity_tokens > least]


def prefer(candidates: list[Candidate], avoid: frozenset[str]) -> list[Candidate]:
    """Without those to avoid, role by role, unless a role would be left without any."""
    if not avoid:
        return candidates
    kept = [c for c in candidates if c.worker_id not in avoid]
    kept_roles = {c.role for c in kept}
    return kept + [c for c in candidates if c.worker_id in avoid and c.role not in kept_roles]


def unbarred(
    givers: list[Candidate], receiver: Candidate, barred: frozenset[tuple[str, str]]
) -> list[Candidate]:
    """The givers that may hand KV to `receiver` now."""
    return [g for g in givers if (g.worker_id, receiver.worker_id) not in barred]
