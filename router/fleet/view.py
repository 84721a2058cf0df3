"""The current state of a worker as one value. The console, the Admin API and the metrics render it.
The command line shows the rows of the Admin API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import KvReport, WorkerInfo, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from router.fleet.health import Breaker, BreakerState
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.placement.values import MemberState


class BreakerView(Struct, frozen=True):
    """A circuit breaker at one time. `remaining_s`: seconds until it is half open. `failures`: in a
    row."""

    state: BreakerState
    reason: str
    remaining_s: float
    failures: int


class WorkerView(Struct, frozen=True):
    """One worker at one time.

    `reason`: why it gets no requests; "" if it gets them, drains or connects. `weights`: version of
    its weights after an update in place. `unhealthy`: its own
    verdict on its machine. `load`, `kv`, `busy_s`: last report; None before the first one and after
    the worker was lost. `placed_requests`, `placed_tokens`: unfinished work that this router placed
    there; tokens of prompts on a prefill worker, of reserved KV blocks on others. `breaker`: None
    if closed. `adapters`: keys of the loaded LoRA adapters.
    """

    info: WorkerInfo
    state: MemberState
    reason: str
    unhealthy: str
    load: WorkerLoad | None
    kv: KvReport | None
    busy_s: float | None
    placed_requests: int
    placed_tokens: int
    breaker: BreakerView | None
    adapters: Sequence[str]
    gpus: Sequence[w.GpuHealth]
    weights: str = ""

    @property
    def labels(self) -> tuple[str, str, str]:
        """Model, role and worker id, the labels of its metrics."""
        return self.info.model.name, self.info.role.value, self.info.worker_id


class PairView(Struct, frozen=True):
    """A pair of workers whose KV transfers failed recently. No request uses it if it is ejected."""

    prefill: str
    decode: str
    is_ejected: bool
    breaker: BreakerView


def worker_views(fleet: Fleet) -> list[WorkerView]:
    """Return the members of the fleet and the crash-looping workers."""
    now = fleet.now()
    return [_worker_view(member, now) for member in fleet.with_crash_loops().values()]


def pair_views(fleet: Fleet) -> list[PairView]:
    """Return the pairs whose KV transfers failed recently, in the order of their first failure."""
    now = fleet.now()
    ejected = fleet.outliers.ejected(now)
    return [
        PairView(pair[0], pair[1], pair in ejected, _breaker_view(breaker, now))
        for pair, breaker in fleet.outliers.breakers.items()
    ]


def _worker_view(member: Member, now: float) -> WorkerView:
    info, report, placed, breaker = member.info, member.reported, member.placed, member.breaker
    is_prefill, lost = info.role is Role.PREFILL, member.lost
    reserved_tokens = placed.reserved_blocks * info.block_size
    return WorkerView(
        info=info,
        state=member.state,
        reason=member.gone or report.unhealthy or _why_unready(member),
        unhealthy=report.unhealthy,
        load=None if lost else report.load,
        kv=None if lost else report.kv,
        busy_s=None if lost else report.busy_s,
        placed_requests=placed.outstanding_requests,
        placed_tokens=placed.outstanding_tokens if is_prefill else reserved_tokens,
        breaker=_breaker_view(breaker, now) if member.suspended else None,
        adapters=sorted(report.adapters),
        gpus=report.gpus,
        weights=report.weights.version,
    )


def _why_unready(member: Member) -> str:
    """Return why a worker that is there gets no requests, or ""."""
    if updating := member.reported.updating:
        return f"its weights change ({updating})"
    if member.is_outdated:
        return "other workers have newer weights (`pdserve checkpoint`)"
    return member.breaker.reason if member.suspended else ""


def _breaker_view(breaker: Breaker, now: float) -> BreakerView:
    return BreakerView(
        breaker.state(now), breaker.reason, breaker.remaining_s(now), breaker.failures
    )
