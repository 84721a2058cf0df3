"""One worker as this router sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.kv_pairs import kind_of
from router.fleet.health import Breaker, StallDetector
from router.placement.values import NO_ADAPTERS, Candidate, MemberState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kv_pairs import KvKind
    from pdserve.step_moments import StepMoments
    from pdserve.types import Adapter, KvReport, WorkerInfo, WorkerLoad
    from pdserve.v1 import worker_pb2 as w


@dataclass(slots=True, eq=False)
class Member:
    """One start of one worker. Changed by `Fleet` and by reservations only.

    `outstanding_tokens` are prompt tokens placed here and not prefilled yet. `reserved_blocks` are
    KV blocks promised to requests of this router, `foreign_blocks` those that requests of other
    routers were last seen to hold. `load`, `kv` and `steps` are None until reported. `lease_end`
    is on the clock of leases; for a lost worker it is the time of its loss. `unhealthy` is the
    worker's own verdict on its machine, `gone` the reason of its loss, `replaced` the instance id
    of the start before this one. `busy_s` is how long the engine's steps took in all, and `open_s`
    what of it requests had taken that are still open, as last reported. `adapters` are the LoRA
    adapters that the worker reported, by key, and `resident` those that this router used last, at
    most `max_loras` unless more are in use, with their open streams. `away` is how far it is from
    the router (placement/topology.py). `recent_steps` came at `recent_steps_at`, on the event
    loop's clock.
    """

    info: WorkerInfo
    lease_end: float = 0.0
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
    unhealthy: str = ""
    gone: str = ""
    replaced: str = ""
    gpus: Sequence[w.GpuHealth] = ()
    recent_steps: w.RecentSteps | None = None
    recent_steps_at: float = 0.0
    open_s: float = 0.0
    busy_s: float | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    adapters_retry_at: float = 0.0
    resident: dict[str, int] = field(default_factory=dict)
    breaker: Breaker = field(default_factory=Breaker)
    away: str = ""
    stalls: StallDetector = field(default_factory=StallDetector)
    kind: KvKind = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.kind = kind_of(self.info)

    @property
    def state(self) -> MemberState:
        if self.lost:
            return MemberState.LOST
        if self.draining:
            return MemberState.DRAINING
        if self.breaker.until is not None or self.unhealthy:
            return MemberState.SUSPENDED
        return MemberState.READY if self.attached else MemberState.CONNECTING

    @property
    def suspended(self) -> bool:
        """It failed, and no probe has passed since."""
        return self.breaker.until is not None

    @property
    def is_suspect(self) -> bool:
        """Only its breaker keeps requests away."""
        others = self.lost or self.draining or self.unhealthy or not self.attached
        return self.suspended and not others

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits the worker."""
        return self.info.total_blocks * self.info.block_size

    @property
    def reserved_tokens(self) -> int:
        return self.reserved_blocks * self.info.block_size

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of `tokens`, capped to those that there are."""
        return min(-(-tokens // self.info.block_size), self.info.total_blocks)

    def use_adapter(self, key: str) -> None:
        """A stream with this adapter begins. The least recently used idle one makes room."""
        self.resident[key] = self.resident.pop(key, 0) + 1
        idle = (x for x, streams in self.resident.items() if not streams)
        if len(self.resident) > self.info.max_loras and (oldest := next(idle, None)) is not None:
            del self.resident[oldest]

    def settled(self, busy_s: float) -> None:
        """A request ended with this share."""
        self.open_s = max(0.0, self.open_s - busy_s)

    def reported(self, load: WorkerLoad) -> bool:
        """Take a report. Return True if the worker has more room than was known.

        Requests of other routers hold blocks if the worker reports more requests than this router
        placed, and more blocks in use than it reserved.
        """
        self.load = load
        before, self.foreign_blocks = self.foreign_blocks, 0
        if load.num_running_reqs + load.num_waiting_reqs > self.outstanding_requests:
            used = self.info.total_blocks - load.free_blocks
            self.foreign_blocks = max(0, used - self.reserved_blocks)
        return self.foreign_blocks < before

    def seen(self, state: MemberState | None = None) -> Candidate:
        """Return the worker as a placement decision sees it now."""
        return Candidate(
            self.info.worker_id,
            self.info.role,
            self.kind,
            self.capacity_tokens,
            self.info,
            state or self.state,
            self.load,
            self.outstanding_requests,
            self.outstanding_tokens,
            self.reserved_blocks + self.foreign_blocks,
            self.adapters.keys(),
            self.resident.copy() if self.resident else NO_ADAPTERS,
            self.away,
        )
