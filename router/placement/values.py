"""What a request asks, what is known of a worker, and what was decided of the two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pdserve import prefix_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.kv_pairs import KvKind
    from pdserve.types import Role, WorkerInfo, WorkerLoad
    from router.fleet.member import MemberState
    from router.placement.context import Prediction
    from router.placement.scoreboard import Scoreboard

NO_TOKENS_CACHED: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class Demand:
    """What a request asks of the pool, in tokens. `prefill_only` asks for one token alone; `avoid`
    are workers to be taken only for want of others; `barred` are pairs (prefill, decode) that must
    not exchange KV now. `token_ids` is the prompt, for those who know what is cached of it. Of
    `kv_tokens` each of the `forks`, answers beyond the first, has `fork_tokens`."""

    model: str
    prompt_tokens: int
    kv_tokens: int
    prefill_only: bool = False
    avoid: frozenset[str] = frozenset()
    barred: frozenset[tuple[str, str]] = frozenset()
    request_id: str = ""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    forks: int = 0
    fork_tokens: int = 0
    _hashes: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def block_hashes(self, block_size: int) -> list[int]:
        """Return the chain hashes of the prompt's blocks that an engine can take from its cache,
        computed once per block size."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes = self._hashes[block_size] = prefix_hash.chain(
                self.token_ids,
                block_size,
                prefix_hash.root(self.model, block_size),
                blocks=prefix_hash.usable_blocks(len(self.token_ids), block_size),
            )
        return hashes

    def without_tokens(self) -> Demand:
        """As a log may keep it. Written out: `replace` takes three times as long."""
        return Demand(
            self.model,
            self.prompt_tokens,
            self.kv_tokens,
            self.prefill_only,
            self.avoid,
            self.barred,
            self.request_id,
            (),
            self.forks,
            self.fork_tokens,
        )

    def without_forks(self) -> Demand:
        """What one of the answers asks by itself."""
        kv_tokens = self.kv_tokens - self.forks * self.fork_tokens
        return replace(self, kv_tokens=kv_tokens, forks=0, fork_tokens=0)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One worker as a decision sees it; it never changes afterwards. `kind` says with whom it can
    exchange KV. What this router placed itself is always known (`outstanding_tokens` of prompts
    not yet prefilled, `reserved_blocks` of KV promised); `load` is None until it was reported."""

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

    @property
    def taken(self) -> float:
        """The share of its seats, or of its blocks, that this router knows to be taken."""
        info = self.info
        seats = self.outstanding_requests / info.max_num_seqs
        return max(seats, self.reserved_blocks / info.total_blocks)

    def has_room(self, tokens: int) -> bool:
        """Whether the blocks for `tokens` are promised to nobody else."""
        info = self.info
        blocks = min(-(-tokens // info.block_size), info.total_blocks)
        return self.reserved_blocks + blocks <= info.total_blocks


@dataclass(slots=True)
class Placement:
    """Where a request goes. Without `prefill`, `decode` does both phases."""

    decode: Candidate
    prefill: Candidate | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a policy made of what it was given, with its reasons.

    `placement` is None where room must be waited for. The scoreboards hold those that were scored,
    `totals` what was compared in the end, `cached` (where `asked_prefix`) and `predictions` what
    the lookups answered. Why another was passed over follows from that: `verdicts.why_not`.
    """

    policy: str
    candidates: Sequence[Candidate]
    demand: Demand
    turn: int
    placement: Placement | None
    decode: Scoreboard | None = None
    prefill: Scoreboard | None = None
    totals: Mapping[Candidate, float] = field(default_factory=dict)
    cached: Mapping[str, int] = field(default_factory=dict)
    predictions: Sequence[Prediction] = ()
    asked_prefix: bool = False

    def without_tokens(self) -> Decision:
        """The same, of a demand without its prompt's tokens."""
        return self._but(self.demand.without_tokens(), self.placement, self.predictions)

    def predicting(
        self, placement: Placement | None, predictions: Sequence[Prediction]
    ) -> Decision:
        """The same by its scores, and another placement for what was predicted."""
        return self._but(self.demand, placement, predictions)

    def _but(
        self, demand: Demand, placement: Placement | None, predictions: Sequence[Prediction]
    ) -> Decision:
        """Written out, as for demands."""
        return Decision(
            self.policy,
            self.candidates,
            demand,
            self.turn,
            placement,
            self.decode,
            self.prefill,
            self.totals,
            self.cached,
            predictions,
            self.asked_prefix,
        )
