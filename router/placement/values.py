"""Inputs and results of a placement: the request, the workers, the decision and its reasons."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs

from pdserve import prefix_hash

if TYPE_CHECKING:
    from pdserve.kv_pairs import KvKind
    from pdserve.types import Role, WorkerInfo, WorkerLoad

Cached = Mapping[str, int]
"""Cached prompt tokens by worker id; workers without any are left out. Tokens in a tier count as
the cached ones that save as much time."""

NO_TOKENS_CACHED: Cached = MappingProxyType({})
NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})


class MemberState(StrEnum):
    """Only a ready worker gets requests."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    LOST = "lost"


class Demand(Struct, gc=False):
    """What a request needs, in tokens; not changed after it was made.

    `prefill_only`: one token is wanted, so no decode. `avoid`: workers to use only if there is no
    other. `excluded`: pairs (prefill, decode) that must not exchange KV now. `children_tokens`:
    the part of `kv_tokens` for answers beyond the first. `adapter`: key of a LoRA adapter.
    `revision`: whose workers it may use, None for all; `spilled_from`: the revision before, which
    has no workers. `cache_salt`: part of the block hashes, which `hashes` has
    by block size, computed from `token_ids`.
    """

    model: str
    prompt_tokens: int
    kv_tokens: int
    prefill_only: bool = False
    avoid: frozenset[str] = frozenset()
    excluded: frozenset[tuple[str, str]] = frozenset()
    request_id: str = ""
    token_ids: tuple[int, ...] = ()
    children_tokens: int = 0
    adapter: str = ""
    revision: str | None = None
    spilled_from: str | None = None
    cache_salt: str = ""
    hashes: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return f"Demand of {self.request_id}"  # without the prompt

    @property
    def wanted(self) -> str:
        """What is asked for, for errors."""
        return f"model {self.model}" + (f" with adapter {self.adapter}" if self.adapter else "")

    def block_hashes(self, block_size: int) -> list[int]:
        """Return the chain hashes of the prompt's blocks that an engine can take from its cache,
        computed once per block size."""
        hashes = self.hashes.get(block_size)
        if hashes is None:
            root = prefix_hash.root(self.model, block_size, self.adapter, self.cache_salt)
            blocks = prefix_hash.usable_blocks(len(self.token_ids), block_size)
            hashes = prefix_hash.chain(self.token_ids, block_size, root, blocks=blocks)
            self.hashes[block_size] = hashes
        return hashes


class Candidate(Struct, eq=False, gc=False):
    """A worker as one decision sees it; not changed after it was made.

    `kind` tells which workers it can exchange KV with. `load` is None until the worker reported it.
    This router's own placements are always known: `outstanding_tokens` of prompts not yet
    prefilled, `reserved_blocks` of KV, and in `resident` the open streams of each LoRA adapter that
    was last used there. `adapters` are the keys of those that are loaded. `away` is how far it is
    from the router (topology.py).
    """

    worker_id: str
    role: Role
    kind: KvKind
    capacity_tokens: int
    info: WorkerInfo
    state: MemberState
    load: WorkerLoad | None
    outstanding_requests: int
    outstanding_tokens: int
    reserved_blocks: int
    adapters: Container[str] = ()
    resident: Mapping[str, int] = NO_ADAPTERS
    away: str = ""

    @property
    def used(self) -> float:
        """Share of the slots, or of the KV blocks, that this router uses."""
        slots = self.outstanding_requests / self.info.max_num_seqs
        return max(slots, self.reserved_blocks / self.info.total_blocks)

    def has_room(self, demand: Demand) -> bool:
        """Return True if KV blocks for `demand` are not reserved, and its adapter can run."""
        info = self.info
        blocks = min(-(-demand.kv_tokens // info.block_size), info.total_blocks)
        has_blocks = self.reserved_blocks + blocks <= info.total_blocks
        return has_blocks and self.can_run(demand.adapter)

    def can_run(self, adapter: str) -> bool:
        """Return False if as many other adapters run as the engine runs at a time: it would keep
        the request waiting until one of them ends."""
        if not adapter or self.resident.get(adapter):
            return True
        return sum(map(bool, self.resident.values())) < self.info.max_loras


class Placement(Struct, frozen=True, gc=False):
    """Where a request goes. Without `prefill`, `decode` does both phases (aggregated)."""

    decode: Candidate
    prefill: Candidate | None = None


class Prediction(Struct, frozen=True):
    """Predicted latency of a placement, in seconds. `prefill` is None if it is aggregated.

    `ttft_s` is from placement to the first token, `queue_s` the part of it behind other prompts;
    `itl_s` is the time between tokens on the decode worker; `itl_harm_s` the delay of the streams
    there, summed; `transfer_s` the wait of decode for KV after prefill. `cost_s` weighs all of it
    (router/placement/cost.py).
    """

    prefill: str | None
    decode: str
    ttft_s: float
    itl_harm_s: float
    transfer_s: float = 0.0
    queue_s: float = 0.0
    itl_s: float = 0.0
    cost_s: float = 0.0


Scorer = Callable[[Sequence[Candidate], Demand, Cached], list[float]]
"""Scores candidates for a demand: 0 to 1, the best."""

Weights = tuple[tuple[Scorer, float], ...]
"""Scorers with weights that sum to 1. Without any, all candidates score alike."""


class Scoreboard(Struct, frozen=True, eq=False, gc=False):
    """Scores of one phase: a column for each scorer, and their weighted sums."""

    weights: Weights
    candidates: Sequence[Candidate]
    columns: Sequence[list[float]]
    totals: dict[Candidate, float]


class Decision(Struct, eq=False, gc=False):
    """Result of a policy, with its reasons; not changed after the policy returned it. `placement`
    is None if the request has to wait for capacity. `totals` is what was compared last. `in_tiers`
    are the prompt tokens in host memory by worker id. `filters.why_not` derives why the other
    candidates lost."""

    policy: str
    candidates: Sequence[Candidate]
    demand: Demand
    turn: int
    placement: Placement | None = None
    decode: Scoreboard | None = None
    prefill: Scoreboard | None = None
    totals: Mapping[Candidate, float] = MappingProxyType({})
    cached: Cached = NO_TOKENS_CACHED
    in_tiers: Mapping[str, int] = NO_TOKENS_CACHED
    predictions: Sequence[Prediction] = ()
    asked_prefix: bool = False

    def without_prompt(self) -> Decision:
        """Return the decision without the prompt's tokens."""
        demand = structs.replace(self.demand, token_ids=(), cache_salt="", hashes={})
        return structs.replace(self, demand=demand)


class PrefixLookup(Protocol):
    def cached_tokens(self, demand: Demand) -> Cached: ...

    def tokens_with_tiers(self, demand: Demand) -> Mapping[str, int]:
        """Return the tokens in caches and tiers; empty if nothing is in tiers."""
        ...


class Predictor(Protocol):
    def predict(
        self, demand: Demand, prefill: Candidate | None, decode: Candidate, cached: Cached
    ) -> Prediction | None:
        """Return None while too little was measured."""
        ...

    def tier_worth(self, demand: Demand, worker: Candidate, cached: int, in_tiers: int) -> int:
        """Return the cached tokens that would save as much time as loading `in_tiers` tokens."""
        ...

    def distance_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        """Return the wait for KV between workers as far apart as these."""
        ...


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """Lookups that a policy may use."""

    prefix: PrefixLookup | None = None
    cost: Predictor | None = None


NO_CONTEXT = PlacementContext()
