"""Inputs and results of a placement: the request, the workers, the decision and its reasons."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs

from pdserve.model import prefix_hash
from pdserve.types import Regions  # noqa: TC001 - msgspec evaluates the hints of a Struct

if TYPE_CHECKING:
    from pdserve.kv_compatibility import KvKind
    from pdserve.types import Role, WorkerInfo, WorkerLoad

Cached = Mapping[str, int]
"""Cached prompt tokens by worker id, if any. Tokens in host memory or to be copied from another
worker count as the number that saves as much time."""

NO_TOKENS_CACHED: Cached = MappingProxyType({})
NO_ADAPTERS: Mapping[str, int] = MappingProxyType({})


def may_hold(regions: Regions, topology: Mapping[str, str]) -> bool:
    """Return True if a place with these labels may hold bytes of a request with these `regions`.

    Whatever could move or keep bytes of a request asks this first: filters (for prefill, decode,
    retries, failover and role changes), encoders, pooling workers, rendering, and holders of cached
    KV. A place without a region holds no bytes of a request that has regions.
    """
    return regions is None or topology.get("region") in regions


def shown_regions(regions: Iterable[str]) -> str:
    """Return regions as one word."""
    return "+".join(sorted(regions))


class MemberState(StrEnum):
    """State of a worker. Only a ready worker gets requests."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    UPDATING = "updating"  # its weights change, or are not those of the model's last update
    SUSPENDED = "suspended"
    LOST = "lost"  # without deregistering
    LEFT = "left"  # deregistered
    CRASH_LOOPING = "crash-looping"


class Demand(Struct, gc=False):
    """Resources and constraints of one request, in tokens. Immutable by convention.

    `prefill_only`: at most one token is wanted, so there is no decode. `computes_all`: engines read
    no cached KV of the prompt, because the experts of all its tokens are wanted. `avoid`: workers
    to use only if nothing else fits. `without`: workers never to use. `excluded`: (prefill, decode)
    pairs that must not exchange KV now. `children_tokens`: the part of `kv_tokens` for answers
    beyond the first. `adapter`: key of a LoRA adapter. `revision`: revision of the workers to use,
    None for all. `spilled_from`: the request's own revision, if it has no usable workers.
    `cache_salt`, `media` (content hash, offset and length of each image): part of the block hashes.
    `session`, `session_workers`: id of the conversation, and the workers of its last turn.
    `regions`: where bytes of the request may be. `hashes`: block hashes of `token_ids` by block
    size, a cache.
    """

    model: str
    prompt_tokens: int
    kv_tokens: int
    prefill_only: bool = False
    avoid: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    excluded: frozenset[tuple[str, str]] = frozenset()
    request_id: str = ""
    token_ids: Sequence[int] = ()
    children_tokens: int = 0
    adapter: str = ""
    revision: str | None = None
    spilled_from: str | None = None
    cache_salt: str = ""
    media: tuple[tuple[str, int, int], ...] = ()
    session: str = ""
    session_workers: frozenset[str] = frozenset()
    regions: Regions = None
    computes_all: bool = False
    hashes: dict[int, list[int]] = {}

    def __repr__(self) -> str:
        return f"Demand of {self.request_id}"  # prompts must not get into logs

    @property
    def wanted(self) -> str:
        """Model, adapter and regions, for error messages."""
        adapter = f" with adapter {self.adapter}" if self.adapter else ""
        place = "" if self.regions is None else f" in region {shown_regions(self.regions)}"
        return f"model {self.model}{adapter}{place}"

    def block_hashes(self, block_size: int) -> list[int]:
        """Return the chain hashes of the prompt blocks that an engine can reuse from its cache.
        Computed once per block size."""
        if self.computes_all:
            return []
        hashes = self.hashes.get(block_size)
        if hashes is None:
            root = prefix_hash.root(self.model, block_size, self.adapter, self.cache_salt)
            blocks = prefix_hash.usable_blocks(len(self.token_ids), block_size)
            media = prefix_hash.media_keys(self.media, block_size)
            hashes = prefix_hash.chain(self.token_ids, block_size, root, blocks=blocks, media=media)
            self.hashes[block_size] = hashes
        return hashes


# Compared by identity, because candidates are dictionary keys. `gc=False`, here and below, because
# thousands of decisions are kept and have no cycles.
class Candidate(Struct, eq=False, gc=False, kw_only=True):
    """Snapshot of a worker for one placement decision. Immutable by convention.

    `kind`: the KV it can exchange, which determines its partners. `load`: None before the first
    report. This router's own placements are exact: `outstanding_tokens` of prompts not yet
    prefilled, `reserved_blocks` of KV, and `resident`, the open streams of each recently used LoRA
    adapter. `adapters`: keys of the loaded adapters. `router_distance`: see topology.py.
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
    router_distance: str = ""

    @property
    def used(self) -> float:
        """Share of the slots or of the KV blocks that are in use, whichever is higher."""
        slots = self.outstanding_requests / self.info.limits.max_num_seqs
        return max(slots, self.reserved_blocks / self.info.total_blocks)

    def has_room(self, demand: Demand) -> bool:
        """Return True if the worker has free KV blocks for `demand` and can run its adapter."""
        info = self.info
        # Capped, so that a request for more than the whole worker can run on an idle one.
        blocks = min(-(-demand.kv_tokens // info.block_size), info.total_blocks)
        has_blocks = self.reserved_blocks + blocks <= info.total_blocks
        return has_blocks and self.can_run(demand.adapter)

    def can_run(self, adapter: str) -> bool:
        """Return False if the engine already runs its maximum of other adapters: it would queue the
        request until one of them ends."""
        if not adapter or self.resident.get(adapter):
            return True
        return sum(map(bool, self.resident.values())) < self.info.limits.max_loras


class Placement(Struct, frozen=True, gc=False):
    """Workers selected for a request. Without `prefill`, `decode` does both phases (aggregated)."""

    decode: Candidate
    prefill: Candidate | None = None


class Prediction(Struct, frozen=True):
    """Predicted latency of a placement, in seconds. `prefill` is None if it is aggregated.

    `ttft_s`: from placement to the first token. `queue_s`: its part behind other prompts. `itl_s`:
    time between tokens on the decode worker. `itl_harm_s`: summed delay of the streams there.
    `transfer_s`: wait of decode for KV after prefill. `cost_s`: weighted sum of all
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
"""Returns one score per candidate, from 0 to 1. Higher is better."""

Weights = tuple[tuple[Scorer, float], ...]
"""Scorers with weights that sum to 1. Without scorers, all candidates have equal scores."""


class Scoreboard(Struct, frozen=True, eq=False, gc=False):
    """Scores of one phase: one column per scorer, and the weighted sum per candidate."""

    weights: Weights
    candidates: Sequence[Candidate]
    columns: Sequence[list[float]]
    totals: dict[Candidate, float]


class PrefixFetch(Struct, frozen=True, gc=False):
    """Cached blocks that a worker lacks and another one, the `holder`, has.

    `tokens`: the prompt tokens that the holder has cached, up to the block with the chain hash
    `last_block`. `missing`: the part of `tokens` that the worker lacks. `copy_s`, `compute_s`:
    predicted time to copy and to compute `missing`. `transfer_s`: the part of `copy_s` outside
    engine steps. `worth`: number of cached tokens that save as much time, 0 if they are not copied.
    """

    holder: str
    tokens: int
    missing: int
    last_block: int
    copy_s: float
    compute_s: float
    transfer_s: float
    worth: int


class Decision(Struct, frozen=True, eq=False, gc=False):
    """Result of a policy, with its reasons.

    `placement` is None if the request has to wait for capacity. `totals`: the scores of the last
    comparison. `in_tiers`: prompt tokens in host memory by worker id. `fetches`: by id of the
    worker that computes the prompt, the blocks it could copy from a holder. `encoder`: the encode
    worker of the images, "" if none; `encoder_reason`: why (encoders.py). `not_drawn`: number of
    workers outside the sample that was compared. `filters.why_not` derives why the other candidates
    lost.
    """

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
    fetches: Mapping[str, PrefixFetch] = MappingProxyType({})
    predictions: Sequence[Prediction] = ()
    asked_prefix: bool = False
    encoder: str = ""
    encoder_reason: str = ""
    not_drawn: int = 0

    def without_prompt(self) -> Decision:
        """Return the decision without the prompt's tokens."""
        demand = structs.replace(self.demand, token_ids=(), cache_salt="", hashes={})
        return structs.replace(self, demand=demand)


class PrefixLookup(Protocol):
    def cached_tokens(self, demand: Demand) -> Cached: ...

    def tokens_with_tiers(self, demand: Demand) -> Mapping[str, int]:
        """Return the tokens in caches and host memory by worker id; empty if host memory has
        none."""
        ...


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A cache look-up with a known result."""

    cached: Cached
    prefix: PrefixLookup

    def cached_tokens(self, _demand: Demand) -> Cached:
        return self.cached

    def tokens_with_tiers(self, demand: Demand) -> Mapping[str, int]:
        return self.prefix.tokens_with_tiers(demand)


class Predictor(Protocol):
    def predict(
        self, demand: Demand, prefill: Candidate | None, decode: Candidate, cached: Cached
    ) -> Prediction | None:
        """Predict a placement. Return None while there are too few measurements."""
        ...

    def tier_worth(self, demand: Demand, worker: Candidate, cached: int, in_tiers: int) -> int:
        """Return the number of cached tokens that save as much time as loading `in_tiers` tokens
        from host memory."""
        ...

    def fetch(
        self, demand: Demand, worker: Candidate, holder: Candidate, cached: int, held: int
    ) -> PrefixFetch | None:
        """Predict a copy of cached tokens. Return None while there are too few measurements."""
        ...

    def distance_s(self, model: str, prefill: Candidate, decode: Candidate) -> float:
        """Return the wait for KV between workers at this distance."""
        ...


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """Look-ups that a policy may use. Both are optional. `fetches`: whether workers may copy cached
    KV from others."""

    prefix: PrefixLookup | None = None
    cost: Predictor | None = None
    fetches: bool = True


NO_CONTEXT = PlacementContext()
