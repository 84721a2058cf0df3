"""Membership of the fleet, without I/O: leases, states, and what workers reported.

    register ──► connecting ⇄ ready ──► draining
                     │          │           │
                     └──── lost (lease expired, replaced, deregistered) ──► forgotten

Transitions take the time as an argument. Leases use the pausing clock of `router/fleet/health.py`,
breakers the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.types import Role
from router.fleet.health import Breaker, BreakerLimits, BreakerState
from router.fleet.member import Member
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.types import KvReport, ModelInfo, WorkerInfo, WorkerLoad
    from router.placement.values import Candidate

FORGET_AFTER_S = 60.0
REMEMBERED_STARTS = 8
_MAX_NAMED = 3


@dataclass(slots=True)
class WorkerPool:
    """State: `members` by worker id. With `by_probe` only probes try suspended workers."""

    lease_s: float
    breaker_limits: BreakerLimits = field(default_factory=BreakerLimits)
    by_probe: bool = False
    members: dict[str, Member] = field(default_factory=dict)
    _by_model: dict[str, list[Member]] = field(default_factory=dict, init=False, repr=False)
    _models: dict[str, ModelInfo] = field(default_factory=dict, init=False, repr=False)

    def register(self, info: WorkerInfo, now: float) -> None:
        """Add a worker, or renew it if this start of it is known.

        Raises InvalidRequest, naming the field, if it cannot serve beside the others, or if a later
        start of it has registered: a late message must not replace that.
        """
        self._check(info)
        known = self.members.get(info.worker_id)
        if known is not None and not known.lost and info.instance_id in known.replaced:
            raise InvalidRequest(
                f"worker {info.worker_id}: a later start of it has registered", field="worker_id"
            )
        if known is not None and not known.lost:
            if known.info == info:
                known.lease_end = now + self.lease_s
                return
            self._lose(known, now, "it registered again")
        breaker = Breaker(self.breaker_limits)
        member = Member(info, now + self.lease_s, breaker=breaker)
        if known is not None:
            instance_ids = dict.fromkeys((*known.replaced, known.info.instance_id))
            instance_ids.pop(info.instance_id, None)
            member.replaced = tuple(instance_ids)[-REMEMBERED_STARTS:]
        self.members[info.worker_id] = member
        self._forget_views()

    def _check(self, info: WorkerInfo) -> None:
        if info.role is not Role.AGGREGATED and info.kv is None:
            raise InvalidRequest(
                f"worker {info.worker_id}: a {info.role} worker needs a kv endpoint",
                field="worker.kv",
            )
        for other in self.of_model(info.model.name):
            if other.lost or other.worker_id == info.worker_id:
                continue
            for name in ("vocab_size", "max_model_len"):
                ours, theirs = getattr(info.model, name), getattr(other.info.model, name)
                if ours != theirs:
                    raise InvalidRequest(
                        f"worker {info.worker_id}: model {info.model.name} has {name} {ours}, but "
                        f"{theirs} on worker {other.worker_id}",
                        field=f"worker.model.{name}",
                    )

    def renew(
        self,
        worker_id: str,
        instance_id: str,
        now: float,
        *,
        load: WorkerLoad | None,
        draining: bool,
        kv: KvReport | None = None,
        unhealthy: str = "",
    ) -> Member | None:
        """Extend a lease. Return None if this start of the worker must register. A report that was
        not sent leaves the last one as it is."""
        member = self._current(worker_id, instance_id)
        if member is None:
            return None
        member.lease_end = now + self.lease_s
        member.draining = draining
        member.unhealthy = unhealthy
        if load is not None:
            self.reported(member, load)
        if kv is not None:
            member.kv = kv
        return member

    def deregister(self, worker_id: str, instance_id: str, now: float) -> None:
        """The worker leaves; unknown workers are ignored."""
        member = self._current(worker_id, instance_id)
        if member is not None:
            self._lose(member, now, "it left")

    def attached(self, member: Member) -> None:
        """The connection to a worker is up."""
        member.attached = not member.lost

    def detached(self, member: Member) -> None:
        """The connection is down: the state of the engine is unknown."""
        member.attached = False
        member.load = member.kv = None
        member.foreign_blocks = 0

    def reported(self, member: Member, load: WorkerLoad) -> bool:
        """Return True if the worker has more room than was known."""
        member.load = load
        before, member.foreign_blocks = member.foreign_blocks, _foreign_blocks(member, load)
        return member.foreign_blocks < before

    def stalled(self, member: Member, now: float, reason: str) -> None:
        """The worker hangs."""
        member.breaker.trip(now, reason)
        self._update_suspended(member, now)

    def failed(self, member: Member, now: float, reason: str) -> bool:
        """The worker failed a request. Return True if that suspends it."""
        opened = member.breaker.failure(now, reason)
        self._update_suspended(member, now)
        return opened

    def succeeded(self, member: Member, now: float) -> bool:
        """The worker began to answer a request. Return True if that ends its suspension."""
        closed = member.breaker.success()
        self._update_suspended(member, now)
        return closed

    def placed(self, member: Member, now: float) -> None:
        """A request was sent to the worker: the only one, if it is suspended and tried again."""
        if member.breaker.try_once(now):
            self._update_suspended(member, now)

    def end_suspensions(self, now: float) -> bool:
        """Let suspended workers be tried whose time is over. Return True if there are some."""
        members = [m for m in self.members.values() if m.suspended]
        for member in members:
            self._update_suspended(member, now)
        return any(not m.suspended for m in members)

    def _update_suspended(self, member: Member, now: float) -> None:
        state = member.breaker.state(now)
        member.suspended = state is BreakerState.OPEN or (
            self.by_probe and state is BreakerState.HALF_OPEN
        )

    def expire(self, now: float) -> None:
        """Lose the workers whose lease is over, and forget those lost for a while."""
        for member in list(self.members.values()):
            if not member.lost and now >= member.lease_end:
                self._lose(member, now, "its lease expired")
            elif member.lost and now - member.lease_end >= FORGET_AFTER_S:
                del self.members[member.worker_id]
                self._forget_views()

    def close(self, now: float) -> None:
        """Lose every worker."""
        for member in self.members.values():
            if not member.lost:
                self._lose(member, now, "the router is closing")

    def _current(self, worker_id: str, instance_id: str) -> Member | None:
        member = self.members.get(worker_id)
        if member is None or member.lost or member.info.instance_id != instance_id:
            return None
        return member

    def _forget_views(self) -> None:
        self._by_model.clear()
        self._models = {}

    def _lose(self, member: Member, now: float, why: str) -> None:
        member.lost = True
        self._models = {}
        member.gone = why
        member.attached = False
        member.lease_end = now

    def models(self) -> Mapping[str, ModelInfo]:
        """Return the models of all workers by name. The model of a lost worker stays until that is
        forgotten: requests wait for its return."""
        if not self._models:
            members = sorted(self.members.values(), key=lambda m: not m.lost)
            self._models = {m.info.model.name: m.info.model for m in members}
        return self._models

    def of_model(self, name: str) -> Sequence[Member]:
        """Return the workers of a model, lost ones too, in the order of registration."""
        found = self._by_model.get(name)
        if found is None:
            found = [m for m in self.members.values() if m.info.model.name == name]
            if found:
                self._by_model[name] = found
        return found

    def largest(self, model: str, *, prefill_only: bool) -> tuple[int, int]:
        """Return the most tokens that a worker of a model holds, and the largest block size.
        Prefill workers count only with `prefill_only`, or if there are no others."""
        members = self.of_model(model)
        able = [m for m in members if prefill_only or m.info.role is not Role.PREFILL] or members
        return max(m.capacity_tokens for m in able), max(m.info.block_size for m in able)

    def candidates(self, model: str) -> list[Candidate]:
        """Return the workers of a model as a placement decision sees them. If none is ready,
        suspended workers count as ready: there is nowhere else to go."""
        members = self.of_model(model)
        if any(m.state is MemberState.READY for m in members):
            return [m.seen() for m in members]
        return [m.seen(MemberState.READY if m.is_suspect else None) for m in members]

    def has_ready(self, model: str) -> bool:
        return any(m.state is MemberState.READY for m in self.of_model(model))

    def is_last(self, member: Member) -> bool:
        """Return whether no other worker of its model is ready."""
        others = self.of_model(member.info.model.name)
        return not any(m.state is MemberState.READY for m in others if m is not member)

    def why_none(self) -> str:
        """Return what to say if no model is served."""
        gone = [m for m in self.members.values() if m.lost]
        if not gone:
            return "no worker has registered yet"
        said = "; ".join(f"{m.worker_id} is gone: {m.gone}" for m in gone[-_MAX_NAMED:])
        return f"no worker is left: {said}"


def _foreign_blocks(member: Member, load: WorkerLoad) -> int:
    """Return the blocks that requests of other routers hold, if the worker reports more requests
    than this router placed, and more blocks in use than it reserved."""
    if load.num_running_reqs + load.num_waiting_reqs <= member.outstanding_requests:
        return 0
    return max(0, member.info.total_blocks - load.free_blocks - member.reserved_blocks)
