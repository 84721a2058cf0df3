"""Membership: which workers there are, what each is doing, and what this router has placed there.

Every transition is a synchronous function with the clock passed in, and returns the links to open
and to close; `router/fleet.py` does that. Leases are counted on a clock of their own
(`router/attention.py`): what registers, renews, ends and expires is told that one, the breakers'
transitions the other.

    register ──► connecting ⇄ ready ──► draining
                     │          │           │
                     └──── lost (lease over, replaced, deregistered) ──► removed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from pdserve.types import Role
from router.breaker import Breaker, BreakerLimits, BreakerState
from router.member import Member, MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.step_moments import StepMoments
    from pdserve.types import KvReport, ModelInfo, WorkerInfo, WorkerLoad
    from router.placement.values import Candidate

FORGET_AFTER_S = 60.0
REMEMBERED_STARTS = 8
_MAX_SAID = 3


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Attach to this worker."""

    member: Member


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Let go of this worker; its streams fail with `reason`."""

    member: Member
    reason: str


PoolAction = OpenLink | CloseLink


@dataclass(slots=True)
class WorkerPool:
    """Members by worker id; state: `members`, changed by the methods below and nobody else. With
    `by_canary` no request tries a half-open member: canaries do (router/canaries.py)."""

    lease_s: float
    breaker_limits: BreakerLimits = field(default_factory=BreakerLimits)
    by_canary: bool = False
    members: dict[str, Member] = field(default_factory=dict)
    _by_model: dict[str, list[Member]] = field(default_factory=dict, init=False, repr=False)
    _by_role: dict[str, Mapping[Role, Sequence[Member]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _changed: dict[str, set[Member]] = field(default_factory=dict, init=False, repr=False)
    _largest: dict[tuple[str, bool], tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False
    )
    _models: dict[str, ModelInfo] | None = field(default=None, init=False, repr=False)

    def register(self, info: WorkerInfo, now: float) -> list[PoolAction]:
        """Take a worker in, or renew it where this very start of it is known.

        Raises InvalidRequest, naming the field, where it cannot serve beside the others, or where a
        later start of it is here: what comes late of an earlier one must not cut the later one off.
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
                return []
            actions = self._lose(known, now, "it registered anew")
        else:
            actions = []
        member = Member(
            info,
            now + self.lease_s,
            self.changed(info.model.name),
            breaker=Breaker(self.breaker_limits),
        )
        if known is not None:
            instance_ids = dict.fromkeys((*known.replaced, known.info.instance_id))
            instance_ids.pop(info.instance_id, None)
            member.replaced = tuple(instance_ids)[-REMEMBERED_STARTS:]
        self.members[info.worker_id] = member
        self._membership_changed()
        return [*actions, OpenLink(member)]

    def _check(self, info: WorkerInfo) -> None:
        if info.role is not Role.AGGREGATED and info.kv is None:
            raise InvalidRequest(
                f"worker {info.worker_id}: a {info.role} worker needs a kv endpoint",
                field="worker.kv",
            )
        for other in self.members.values():
            if other.lost or other.worker_id == info.worker_id:
                continue
            theirs = other.info.model
            if theirs.name != info.model.name:
                continue
            for name in ("vocab_size", "max_model_len"):
                ours, known = getattr(info.model, name), getattr(theirs, name)
                if ours != known:
                    raise InvalidRequest(
                        f"worker {info.worker_id}: model {info.model.name} has {name} {ours}, but "
                        f"{known} on worker {other.worker_id}",
                        field=f"worker.model.{name}",
                    )
            return  # those that are members agree with each other

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
    ) -> bool:
        """Extend a lease. False where this start of the worker is not a member: it must register.
        What was not sent leaves the last word as it was."""
        member = self._current(worker_id, instance_id)
        if member is None:
            return False
        member.lease_end = now + self.lease_s
        member.draining = draining
        member.unhealthy = unhealthy
        if load is not None:
            self.reported(member, load)
        if kv is not None:
            member.kv = kv
        return True

    def deregister(self, worker_id: str, instance_id: str, now: float) -> list[PoolAction]:
        """The worker leaves of its own accord; unknown workers are ignored."""
        member = self._current(worker_id, instance_id)
        return [] if member is None else self._lose(member, now, "it left")

    def attached(self, member: Member) -> None:
        """The link to a member is up."""
        member.attached = not member.lost

    def detached(self, member: Member) -> None:
        """The link to a member is down: what its engine does is unknown again."""
        member.attached = False
        member.load = member.kv = None
        member.foreign_blocks = 0

    def reported(self, member: Member, load: WorkerLoad) -> bool:
        """A member said how loaded it is. True where it has more room than was believed."""
        member.load = load
        before, member.foreign_blocks = member.foreign_blocks, _foreign_blocks(member, load)
        return member.foreign_blocks < before

    def tripped(self, member: Member, now: float, reason: str) -> bool:
        """A member does not get on. True where it was given work until now."""
        opened = member.breaker.trip(now, reason)
        self._ask_breaker(member, now)
        return opened

    def failed(self, member: Member, now: float, reason: str) -> bool:
        """A member failed a request. True where it gets no more work for it."""
        opened = member.breaker.failure(now, reason)
        self._ask_breaker(member, now)
        return opened

    def succeeded(self, member: Member, now: float) -> bool:
        """A member did what it was asked. True where it is given work again for that."""
        closed = member.breaker.success()
        self._ask_breaker(member, now)
        return closed

    def placed(self, member: Member, now: float) -> None:
        """A member was given work: all that a half-open one gets, until that has told."""
        if member.breaker.tries(now):
            self._ask_breaker(member, now)

    def let_try(self, now: float) -> bool:
        """Suspended members whose time is over may be tried. True where there are such."""
        members = [m for m in self.members.values() if m.suspended]
        for member in members:
            self._ask_breaker(member, now)
        return any(not m.suspended for m in members)

    def _ask_breaker(self, member: Member, now: float) -> None:
        state = member.breaker.state(now)
        suspended = state is BreakerState.OPEN or (
            self.by_canary and state is BreakerState.HALF_OPEN
        )
        if suspended != member.suspended:
            member.suspended = suspended

    def measured(self, member: Member, steps: StepMoments) -> None:
        """A member said what its steps have cost."""
        member.steps = steps

    def expire(self, now: float) -> list[PoolAction]:
        """Lose the members whose lease is over; forget those lost for a while."""
        actions: list[PoolAction] = []
        for member in list(self.members.values()):
            if member.lost:
                if now - member.lease_end >= FORGET_AFTER_S:
                    del self.members[member.worker_id]
                    self._membership_changed()
            elif now >= member.lease_end:
                actions += self._lose(member, now, "its lease ran out")
        return actions

    def close(self, now: float) -> list[PoolAction]:
        """Lose every member."""
        return [
            action
            for member in self.members.values()
            if not member.lost
            for action in self._lose(member, now, "the router is closing")
        ]

    def _current(self, worker_id: str, instance_id: str) -> Member | None:
        member = self.members.get(worker_id)
        if member is None or member.lost or member.info.instance_id != instance_id:
            return None
        return member

    def _lose(self, member: Member, now: float, why: str) -> list[PoolAction]:
        member.lost = True
        self._models = None
        member.gone = why
        member.attached = False
        member.lease_end = now
        return [CloseLink(member, f"worker {member.worker_id} is gone: {why}")]

    def _membership_changed(self) -> None:
        self._by_model.clear()
        self._by_role.clear()
        names = {m.info.model.name for m in self.members.values()}
        self._changed = {name: x for name, x in self._changed.items() if name in names}
        for changed in self._changed.values():
            changed.clear()
        self._largest.clear()
        self._models = None

    def models(self) -> Mapping[str, ModelInfo]:
        """The models of all members that are not lost, by name."""
        known = self._models
        if known is None:
            members = self.members.values()
            known = {m.info.model.name: m.info.model for m in members if not m.lost}
            self._models = known
        return known

    def of_model(self, name: str) -> Sequence[Member]:
        """The members of a model, lost ones too, in the order in which they registered."""
        found = self._by_model.get(name)
        if found is None:
            found = [m for m in self.members.values() if m.info.model.name == name]
            if found:
                self._by_model[name] = found
        return found

    def by_role(self, name: str) -> Mapping[Role, Sequence[Member]]:
        """The members of a model by what they do; another mapping when members came or went."""
        found = self._by_role.get(name)
        if found is None:
            members = self.of_model(name)
            found = {role: [m for m in members if m.info.role is role] for role in Role}
            if members:
                self._by_role[name] = found
        return found

    def changed(self, name: str) -> set[Member]:
        """The members of a model that may have room for other requests than before, until whoever
        asks clears it, or members come or go."""
        return self._changed.setdefault(name, set())

    def largest(self, model: str, *, prefill_only: bool) -> tuple[int, int]:
        """The most tokens that a worker of a model holds, and the largest block: of those that can
        decode (or with `prefill_only` all); where none can, of all. There is one at least."""
        known = self._largest.get((model, prefill_only))
        if known is None:
            members = self.of_model(model)
            able = [m for m in members if prefill_only or m.info.role is not Role.PREFILL]
            known = (
                max(m.capacity_tokens for m in able or members),
                max(m.info.block_size for m in able or members),
            )
            self._largest[model, prefill_only] = known
        return known

    def candidates(self, model: str) -> list[Candidate]:
        """The members of a model as a decision made now sees them. Where none is ready, those that
        are suspended are tried all the same: what was seen of them may have been a bad moment, and
        there is nowhere else to go."""
        members = self.of_model(model)
        found = [m.seen() for m in members]
        if any(c.state is MemberState.READY for c in found):
            return found
        return [
            replace(c, state=MemberState.READY) if m.is_suspect else c
            for m, c in zip(members, found, strict=True)
        ]

    def is_last(self, member: Member) -> bool:
        """Whether no other member of its model is ready."""
        others = self.of_model(member.info.model.name)
        return not any(m.state is MemberState.READY for m in others if m is not member)

    def why_none(self) -> str:
        """What to say where no model is served."""
        gone = [m for m in self.members.values() if m.lost]
        if not gone:
            return "no worker has registered yet"
        said = "; ".join(f"{m.worker_id} is gone: {m.gone}" for m in gone[-_MAX_SAID:])
        return f"no worker is left: {said}"


def _foreign_blocks(member: Member, load: WorkerLoad) -> int:
    """Blocks that requests of other routers hold, as far as the worker's report shows them: it has
    more requests than this router placed, and more blocks in use than this router reserved."""
    if load.num_running_reqs + load.num_waiting_reqs <= member.outstanding_requests:
        return 0
    return max(0, member.info.total_blocks - load.free_blocks - member.reserved_blocks)
