"""One worker as this router sees it, and what each stream takes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pdserve.kv_pairs import kind_of
from router.breaker import Breaker, BreakerLimits
from router.placement.values import Candidate
from router.progress import ProgressWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.kv_pairs import KvKind
    from pdserve.step_moments import StepMoments
    from pdserve.types import KvReport, WorkerInfo, WorkerLoad


_set = object.__setattr__
# What a worker can be given follows from these, its size and its role.
_ROOM = frozenset(
    (
        "attached",
        "draining",
        "lost",
        "suspended",
        "unhealthy",
        "outstanding_tokens",
        "reserved_blocks",
        "foreign_blocks",
    )
)


class MemberState(StrEnum):
    """Only a ready member is given work."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Member:
    """One start of one worker. Changed by `WorkerPool` and by `Charge` alone.

    `outstanding_tokens` are prompt tokens placed here whose prefill has not ended;
    `reserved_blocks` are KV blocks promised to requests placed here, `foreign_blocks` those that
    other routers' requests were last seen to hold. `load`, `kv` and `steps`
    (what its steps cost) are None until the worker has reported them. `lease_end` is on the pool's
    clock; for a lost member it is when it was lost. `suspended` is what the `breaker` said when it
    was last asked; `unhealthy` what the worker finds wrong with its machine; `gone` why it was
    lost; `replaced` has the instance ids of its earlier starts. It is put into `changed` when what
    it can be given may be another.
    """

    info: WorkerInfo
    lease_end: float
    changed: set[Member] = field(default_factory=set, repr=False)
    attached: bool = False
    draining: bool = False
    lost: bool = False
    load: WorkerLoad | None = None
    outstanding_requests: int = 0
    outstanding_tokens: int = 0
    reserved_blocks: int = 0
    foreign_blocks: int = 0
    kv: KvReport | None = None
    steps: StepMoments | None = None
    suspended: bool = False
    unhealthy: str = ""
    gone: str = ""
    replaced: tuple[str, ...] = ()
    breaker: Breaker = field(default_factory=lambda: Breaker(BreakerLimits()))
    watch: ProgressWatch = field(default_factory=ProgressWatch)
    _kind: KvKind = field(init=False, repr=False)
    _seen: Candidate | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._kind = kind_of(self.info)

    def __setattr__(self, name: str, value: object) -> None:
        # Whoever changes anything makes the next decision look again.
        if name in _ROOM and getattr(self, name, None) != value:
            self.changed.add(self)
        _set(self, name, value)
        _set(self, "_seen", None)

    @property
    def state(self) -> MemberState:
        if self.lost:
            return MemberState.LOST
        if self.draining:
            return MemberState.DRAINING
        if self.suspended or self.unhealthy:
            return MemberState.SUSPENDED
        return MemberState.READY if self.attached else MemberState.CONNECTING

    @property
    def is_suspect(self) -> bool:
        """It gets no work for what was seen of it, and nothing else speaks against it."""
        others = self.lost or self.draining or self.unhealthy or not self.attached
        return self.suspended and not others

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits this worker."""
        return self.info.total_blocks * self.info.block_size

    @property
    def reserved_tokens(self) -> int:
        return self.reserved_blocks * self.info.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` take, never more than there are."""
        return min(-(-tokens // self.info.block_size), self.info.total_blocks)

    def seen(self) -> Candidate:
        """The worker as a decision made now sees it; the same one until something changes."""
        seen = self._seen
        if seen is None:
            seen = Candidate(
                self.info.worker_id,
                self.info.role,
                self._kind,
                self.capacity_tokens,
                self.info,
                self.state,
                self.load,
                self.outstanding_requests,
                self.outstanding_tokens,
                self.reserved_blocks + self.foreign_blocks,
            )
            _set(self, "_seen", seen)
        return seen


class Charge:
    """What one stream takes of one member. Released once; releasing again does nothing."""

    __slots__ = ("_blocks", "_member", "_prompt_tokens", "_released", "on_prefilled")

    def __init__(self, member: Member, *, prompt_tokens: int = 0, kv_tokens: int = 0) -> None:
        self.on_prefilled: Callable[[], None] | None = None
        self._member = member
        self._prompt_tokens = prompt_tokens
        self._blocks = member.blocks_for(kv_tokens)
        self._released = False
        member.outstanding_requests += 1
        if prompt_tokens:
            member.outstanding_tokens += prompt_tokens
        if self._blocks:
            member.reserved_blocks += self._blocks

    def prefilled(self) -> None:
        """The prompt is computed: its tokens are no longer outstanding."""
        if self._prompt_tokens:
            self._member.outstanding_tokens -= self._prompt_tokens
            self._prompt_tokens = 0
        if self.on_prefilled is not None:
            self.on_prefilled()
            self.on_prefilled = None

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self.prefilled()
        self._member.outstanding_requests -= 1
        if self._blocks:
            self._member.reserved_blocks -= self._blocks
