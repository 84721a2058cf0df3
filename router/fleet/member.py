"""State of one worker in this router."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from pdserve.kv_compatibility import kind_of
from pdserve.types import ModelWeights
from router.fleet.compatibility import compared
from router.fleet.health import Breaker
from router.placement.values import NO_ADAPTERS, Candidate, MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.kv_compatibility import KvKind
    from pdserve.observe.step_costs import StepMoments
    from pdserve.types import Adapter, KvReport, WorkerInfo, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from router.fleet.compatibility import Compared

logger = logging.getLogger(__name__)


class Reported(Struct, frozen=True):
    """The last report of a worker. Each renewal of its lease and each frame of its link replaces it
    whole.

    `load`, `kv`, `steps`, `busy_s`: None until reported. `foreign_blocks`: KV blocks that requests
    of other routers held at the time of `load`. `recent_steps_at`: arrival of `recent_steps` on the
    event loop's clock. `unhealthy`: the worker's own verdict on its machine. `adapters`: loaded
    LoRA adapters by key. `busy_s`: total duration of the engine's steps. `streams_s`: the part used
    by open streams and by streams that ended at this router. `updating`: owner and mode of a change
    of its `weights`, "" without one.
    """

    load: WorkerLoad | None = None
    foreign_blocks: int = 0
    kv: KvReport | None = None
    steps: StepMoments | None = None
    recent_steps: w.RecentSteps | None = None
    recent_steps_at: float = 0.0
    draining: bool = False
    unhealthy: str = ""
    gpus: Sequence[w.GpuHealth] = ()
    adapters: Mapping[str, Adapter] = {}
    busy_s: float | None = None
    streams_s: float = 0.0
    weights: ModelWeights = ModelWeights()
    updating: str = ""


@dataclass(slots=True)
class PlacedLoad:
    """Load that this router has placed on a worker: exact and up to date, unlike reports. Changed
    by reservations, and by ending streams (`ended_s`, their engine time). `outstanding_tokens`:
    prompt tokens not prefilled yet. `reserved_blocks`: KV blocks. `resident`: open streams by the
    key of each LoRA adapter used last, at most `max_loras` unless more are in use.
    """

    outstanding_requests: int = 0
    outstanding_tokens: int = 0
    reserved_blocks: int = 0
    resident: dict[str, int] = field(default_factory=dict)
    ended_s: float = 0.0

    def use_adapter(self, key: str, max_loras: int) -> None:
        """Count a stream that uses an adapter. Evicts the least recently used idle adapter if there
        are more than `max_loras`, as the engine does."""
        # Removed and added, to keep the dictionary in order of last use.
        self.resident[key] = self.resident.pop(key, 0) + 1
        idle = (x for x, streams in self.resident.items() if not streams)
        if len(self.resident) > max_loras and (oldest := next(idle, None)) is not None:
            del self.resident[oldest]


@dataclass(slots=True, eq=False)
class Member:
    """One instance (one start) of one worker.

    `Fleet` adds members and changes their lease and loss. Connection and renewals replace
    `reported`, the connection sets `attached`, reservations change `placed`, and results of
    requests and probes change `breaker`.

    `lease_end`: end of the lease on the clock of leases; for a lost worker, the time of its loss.
    `lost_as`: state of a lost worker: LOST, LEFT or CRASH_LOOPING. `gone`: why it was lost.
    `replaced`: instance id of the previous start. `renewals`: the number of its last renewal, 0
    before the first. `is_outdated`: other workers of its model have
    newer weights. `router_distance`: distance from the router (placement/topology.py). `roomier`:
    the fleet's workers that have more room than placements know; whatever frees capacity of this
    worker adds it.
    """

    info: WorkerInfo
    lease_end: float = 0.0
    attached: bool = False
    lost: bool = False
    lost_as: MemberState = MemberState.LOST
    gone: str = ""
    replaced: str = ""
    renewals: int = 0
    is_outdated: bool = False
    router_distance: str = ""
    roomier: set[Member] = field(default_factory=set, repr=False)
    reported: Reported = Reported()  # noqa: RUF009 - immutable
    placed: PlacedLoad = field(default_factory=PlacedLoad)
    breaker: Breaker = field(default_factory=Breaker)
    kind: KvKind = field(init=False, repr=False)
    compared: Compared = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once: each placement compares the kinds of pairs.
        self.kind = kind_of(self.info)
        self.compared = compared(self.info)

    @property
    def has_left(self) -> bool:
        """True if the worker deregistered, because it stopped and did not die."""
        return self.lost_as is MemberState.LEFT

    @property
    def state(self) -> MemberState:
        if self.lost:
            return self.lost_as
        if self.reported.draining:
            return MemberState.DRAINING
        if self.reported.updating or self.is_outdated:
            return MemberState.UPDATING
        if self.breaker.until is not None or self.reported.unhealthy:
            return MemberState.SUSPENDED
        return MemberState.READY if self.attached else MemberState.CONNECTING

    @property
    def suspended(self) -> bool:
        """True if the worker failed and no probe has passed since."""
        return self.breaker.until is not None

    @property
    def is_suspect(self) -> bool:
        """True if only the breaker keeps requests off the worker."""
        report = self.reported
        others = self.lost or report.draining or report.unhealthy or not self.attached
        return self.suspended and not others

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def steps(self) -> StepMoments | None:
        return self.reported.steps

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens whose KV fits into the worker."""
        return self.info.total_blocks * self.info.block_size

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests of all routers hold, as known to this router."""
        return self.placed.reserved_blocks + self.reported.foreign_blocks

    @property
    def open_s(self) -> float:
        """Engine time of the streams that were open at the last report and have not ended since."""
        return max(0.0, self.reported.streams_s - self.placed.ended_s)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks for `tokens`, at most all blocks of the worker."""
        return min(-(-tokens // self.info.block_size), self.info.total_blocks)

    def failed(self, now: float, reason: str) -> None:
        """Record that the engine failed a request."""
        if self.breaker.failure(now, reason):
            logger.warning("worker %s is suspended: %s", self.worker_id, reason)

    def report_load(self, load: WorkerLoad) -> bool:
        """Replace the reported load. Return True if the worker has more room than was known.

        If the worker reports more requests than this router placed, requests of other routers hold
        the used blocks beyond this router's reservations.
        """
        # Routers share no state, so only reports show the requests of other routers.
        before, foreign_blocks, placed = self.reported.foreign_blocks, 0, self.placed
        if load.num_running_reqs + load.num_waiting_reqs > placed.outstanding_requests:
            used = self.info.total_blocks - load.free_blocks
            foreign_blocks = max(0, used - placed.reserved_blocks)
        self.reported = structs.replace(self.reported, load=load, foreign_blocks=foreign_blocks)
        if foreign_blocks < before:
            self.roomier.add(self)
        return foreign_blocks < before

    def snapshot(self, state: MemberState | None = None) -> Candidate:
        """Return a snapshot of the worker for a placement decision."""
        report, placed = self.reported, self.placed
        return Candidate(
            worker_id=self.info.worker_id,
            role=self.info.role,
            kind=self.kind,
            capacity_tokens=self.capacity_tokens,
            info=self.info,
            state=state or self.state,
            load=report.load,
            outstanding_requests=placed.outstanding_requests,
            outstanding_tokens=placed.outstanding_tokens,
            reserved_blocks=self.used_blocks,
            adapters=report.adapters.keys(),
            # Copied, because `explain` shows the decision later.
            resident=placed.resident.copy() if placed.resident else NO_ADAPTERS,
            router_distance=self.router_distance,
        )
