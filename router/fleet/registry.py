"""The fleet: the registered workers, their leases, and views of them.

    register ──► connecting ⇄ ready ──► draining
                     │          │           │
                     └──── lost (lease expired, replaced) or left (deregistered) ──► forgotten

Workers register with every router and renew a lease; routers share nothing else.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.config import HealthConfig
from pdserve.errors import InvalidRequest
from pdserve.types import GENERATING, EngineLimits, ModelInfo, ModelWeights, Role, WorkerInfo
from router.fleet.compatibility import Compared, check_compatible
from router.fleet.health import MAX_TICK_S, Breaker, OutlierEjection, PausingClock
from router.fleet.member import Member, Reported
from router.fleet.shortlist import Shortlist
from router.placement.topology import distance
from router.placement.values import MemberState, may_hold

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.types import Account, Adapter, KvReport, Regions, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from router.placement.topology import Topology
    from router.placement.values import Candidate

_FIRST_WEIGHTS = ModelWeights()
# Seconds that a lost worker stays a member: requests for its model wait for its return, and
# operators see why it was lost.
FORGET_AFTER_S = 60.0
# A pair is ejected for this many times the ejection of a worker.
PAIR_FACTOR = 6


class ChangeSignal:
    """Wakes the tasks that wait for a change."""

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None  # None while no task waits

    async def wait(self, until: float | None = None) -> bool:
        """Wait for the next `notify`. Return False at the loop time `until`."""
        if self._event is None:
            self._event = asyncio.Event()
        try:
            async with asyncio.timeout_at(until):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def notify(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None


@dataclass(frozen=True, slots=True)
class _Derived:
    """Values computed from the members at their first use, because each request reads them and
    members change rarely. A change of the members drops them."""

    by_model: dict[tuple[str, tuple[Role, ...]], list[Member]] = field(default_factory=dict)
    largest: dict[tuple[str, bool], tuple[int, int]] = field(default_factory=dict)
    unsupported: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    shortlists: dict[tuple[str, str, str | None], Shortlist] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)


class _Changes:
    """Signals for tasks that wait for more capacity, or for another set of workers."""

    def __init__(self) -> None:
        self.capacity, self.membership = ChangeSignal(), ChangeSignal()


class Fleet:
    """All workers of this router, by id in `members`.

    `outliers`: pairs of workers that must not exchange KV now. `clock`: default is the event
    loop's. `topology`: labels of this router. Has no tasks: `run_checks` ticks the lease clock and
    calls `expire`, and `LinkPool` keeps a connection to each worker.
    """

    def __init__(
        self,
        *,
        lease_s: float = 5.0,
        health: HealthConfig | None = None,
        clock: Callable[[], float] | None = None,
        topology: Topology | None = None,
        forget_after_s: float = FORGET_AFTER_S,
        max_tick_s: float = MAX_TICK_S,
    ) -> None:
        self.topology = topology or {}
        self.lease_s = lease_s
        self.health = health or HealthConfig()
        self.outliers = OutlierEjection(PAIR_FACTOR * self.health.eject_s)
        self.now = clock or asyncio.get_running_loop().time
        self.lease_clock = PausingClock(self.now, max_tick_s)
        self._forget_after_s = forget_after_s
        self._members: dict[str, Member] = {}
        self.slots = 0  # sum of max_num_seqs over all workers that are not lost
        self._crash_loops: dict[str, Member] = {}
        self._weights: dict[str, ModelWeights] = {}
        self._changes = _Changes()
        self._derived = _Derived()
        self._roomier: set[Member] = set()
        # Live workers by what `check_compatible` compares, since one of each kind is enough.
        self._kinds = defaultdict[Compared, dict[str, WorkerInfo]](dict)

    @property
    def members(self) -> Mapping[str, Member]:
        return self._members

    # -- Changes that tasks wait for

    async def capacity_change(self, *, until: float | None = None) -> bool:
        """Wait until a worker registers, changes its state or has more room. Return False at the
        loop time `until`."""
        return await self._changes.capacity.wait(until)

    def capacity_changed(self) -> None:
        """Wake the tasks that wait in `capacity_change`."""
        self._changes.capacity.notify()

    async def membership_change(self) -> None:
        """Wait until a worker is added or lost."""
        await self._changes.membership.wait()

    # -- Membership

    def register(
        self,
        info: WorkerInfo,
        *,
        draining: bool = False,
        adapters: Collection[Adapter] = (),
        weights: ModelWeights = _FIRST_WEIGHTS,
        updating: str = "",
    ) -> Member | None:
        """Add a worker, or renew its lease if this instance is known. Return its earlier instance
        if that died, that is, was replaced without deregistering.

        Raises InvalidRequest, naming the field, if it is incompatible with the other workers, or if
        a later instance has registered, which a delayed message must not replace.
        """
        known, died = self.members.get(info.worker_id), None
        if known is not None and not known.lost and info.instance_id == known.replaced:
            raise InvalidRequest(
                f"worker {info.worker_id}: a later start of it has registered", field="worker_id"
            )
        if known is None or known.lost or known.info != info:
            # One of each kind; of two, because one may be this worker before its restart.
            others = [x for kind in self._kinds.values() for x in islice(kind.values(), 2)]
            check_compatible(info, others)
            if known is not None and not known.lost:
                self._lose(known, "it registered again")
                died = known if known.info.instance_id != info.instance_id else None
            self._add(info, known)
        self._crash_loops.pop(info.worker_id, None)
        self.renew(
            info.worker_id,
            info.instance_id,
            load=None,
            draining=draining,
            adapters=adapters,
            weights=weights,
            updating=updating,
        )
        return died

    def _add(self, info: WorkerInfo, before: Member | None) -> None:
        member = Member(
            info,
            breaker=Breaker(self.health.eject_s),
            router_distance=distance(self.topology, info.topology),
            roomier=self._roomier,
        )
        if before is not None and before.info.instance_id != info.instance_id:
            member.replaced = before.info.instance_id
        self._members[info.worker_id] = member
        self._kinds[member.compared][info.worker_id] = info
        self.slots += info.limits.max_num_seqs
        self._members_changed()

    def renew(
        self,
        worker_id: str,
        instance_id: str,
        *,
        load: WorkerLoad | None,
        draining: bool,
        kv: KvReport | None = None,
        unhealthy: str = "",
        adapters: Collection[Adapter] = (),
        gpus: Sequence[w.GpuHealth] = (),
        account: Account | None = None,
        weights: ModelWeights = _FIRST_WEIGHTS,
        updating: str = "",
    ) -> Member | None:
        """Extend a lease and return the worker. Return None if this instance is unknown and must
        register. A `load`, `kv` or `account` of None keeps the last report."""
        member = self.current(worker_id, instance_id)
        if member is None:
            return None
        before, report = member.state, member.reported
        member.lease_end = self.lease_clock.now() + self.lease_s
        member.reported = structs.replace(
            report,
            draining=draining,
            unhealthy=unhealthy,
            gpus=gpus,
            kv=report.kv if kv is None else kv,
            adapters={adapter.key: adapter for adapter in adapters},
            busy_s=report.busy_s if account is None else account.busy_s,
            streams_s=report.streams_s
            if account is None
            else account.open_s + member.placed.ended_s,
            weights=weights,
            updating=updating,
        )
        self._compare_weights(member)
        has_more_room = load is not None and member.report_load(load)
        has_other_adapters = member.reported.adapters.keys() != report.adapters.keys()
        if has_other_adapters:
            self._derived.shortlists.clear()
        if has_more_room or has_other_adapters or member.state != before:
            self.capacity_changed()
        return member

    def _compare_weights(self, member: Member) -> None:
        """Follow the newest weights of the model of `member`. Workers with older ones get no
        requests, so two workers with different weights never meet."""
        model, weights = member.info.model.name, member.reported.weights
        newest = self.weights_of(model)
        if weights.identity > newest.identity:
            self._weights[model] = weights
            for other in self.members.values():
                other.is_outdated |= other.info.model.name == model
        member.is_outdated = weights.identity < newest.identity

    def weights_of(self, model: str) -> ModelWeights:
        """Return the newest weights that a worker of `model` has had."""
        return self._weights.get(model, _FIRST_WEIGHTS)

    def deregister(self, worker_id: str, instance_id: str, *, failure: str = "") -> Member | None:
        """Remove a worker that stops, or is lost because of `failure`, and return it. Return None
        for an unknown worker."""
        member = self.current(worker_id, instance_id)
        if member is not None:
            self._lose(member, failure or "it left")
            if not failure:
                member.lost_as = MemberState.LEFT
        return member

    def engine_died(self, member: Member) -> None:
        """Drain a worker whose engine died. It refuses requests until it deregisters."""
        member.reported = structs.replace(member.reported, draining=True)
        self.capacity_changed()

    def report_crash_loop(self, worker_id: str, role: Role, model: str, reason: str) -> None:
        """List a crash-looping worker for operators for one lease. Ignored while connected."""
        known = self.members.get(worker_id)
        if known is not None and known.attached:
            return
        # Only id, role and model are known of a worker that never registered.
        info = WorkerInfo(
            worker_id,
            instance_id="",
            role=role,
            model=ModelInfo(model, "", 0, 0, ""),
            address="",
            kv=None,
            block_size=0,
            total_blocks=0,
            limits=EngineLimits(0),
        )
        self._crash_loops[worker_id] = Member(
            info if known is None else known.info,
            lease_end=self.lease_clock.now() + self.lease_s,
            lost=True,
            lost_as=MemberState.CRASH_LOOPING,
            reported=Reported(unhealthy=reason),
        )

    def expire(self) -> list[Member]:
        """Mark workers with an expired lease as lost, and return them. Forget workers that were
        lost for `forget_after_s`."""
        now, expired = self.lease_clock.now(), []
        for member in list(self.members.values()):
            if not member.lost and now >= member.lease_end:
                self._lose(member, "its lease expired")
                expired.append(member)
            elif member.lost and now - member.lease_end >= self._forget_after_s:
                del self._members[member.worker_id]
                self._members_changed()
        for loop in [x for x in self._crash_loops.values() if now >= x.lease_end]:
            del self._crash_loops[loop.worker_id]
        return expired

    def close(self) -> None:
        """Mark every worker as lost."""
        for member in self.members.values():
            if not member.lost:
                self._lose(member, "the router is closing")

    def current(self, worker_id: str, instance_id: str) -> Member | None:
        """Return the worker if this instance of it is registered and not lost."""
        member = self.members.get(worker_id)
        if member is None or member.lost or member.info.instance_id != instance_id:
            return None
        return member

    def _lose(self, member: Member, why: str) -> None:
        member.lost, member.attached, member.gone = True, False, why
        member.lease_end = self.lease_clock.now()
        kind = self._kinds[member.compared]
        del kind[member.worker_id]
        if not kind:
            del self._kinds[member.compared]
        self.slots -= member.info.limits.max_num_seqs
        self._members_changed()

    def _members_changed(self) -> None:
        self._derived = _Derived()
        self._roomier.clear()
        self._changes.membership.notify()
        self._changes.capacity.notify()

    # -- Views

    def with_crash_loops(self) -> Mapping[str, Member]:
        """Return the members and the crash-looping workers, for status and metrics."""
        return {**self.members, **self._crash_loops}

    def models(self) -> Mapping[str, ModelInfo]:
        """Return the models of all workers by name. The model of a lost worker stays until the
        worker is forgotten, because requests wait for its return."""
        derived = self._derived
        if not derived.models:
            # Lost workers first, so that the models of live ones replace theirs. An encode worker
            # has only a part of its model.
            members = [m for m in self.members.values() if m.info.role is not Role.ENCODE]
            members.sort(key=lambda m: not m.lost)
            derived.models.update({m.info.model.name: m.info.model for m in members})
        return derived.models

    def of_model(self, name: str, roles: tuple[Role, ...] = GENERATING) -> Sequence[Member]:
        """Return the workers of a model that have one of these roles, in order of registration,
        including lost ones."""
        found = self._derived.by_model.get((name, roles))
        if found is None:
            members = [m for m in self.members.values() if m.info.model.name == name]
            found = [m for m in members if m.info.role in roles]
            # Do not keep empty results, because invented names of clients would fill the memory.
            if found:
                self._derived.by_model[name, roles] = found
        return found

    def pooling(self, name: str) -> Sequence[Member]:
        """Return the pooling workers of a model, including lost ones."""
        return self.of_model(name, (Role.POOLING,))

    def encoding(self, name: str) -> Sequence[Member]:
        """Return the encode workers of a model, including lost ones."""
        return self.of_model(name, (Role.ENCODE,))

    def ranks_of(self, member: Member) -> list[Member]:
        """Return the worker and the other ranks of its data-parallel group, without lost ones."""
        group = member.info.group
        if not group or self.members.get(member.worker_id) is not member:
            return [member]  # its group has restarted, with new ranks
        others = [m for m in self.members.values() if m is not member and not m.lost]
        return [member, *(m for m in others if m.info.group == group)]

    def largest(self, model: str, *, prefill_only: bool) -> tuple[int, int]:
        """Return the largest capacity of a worker of a model in tokens, and the largest block size.
        Prefill workers count only with `prefill_only`, or if there are no others."""
        found = self._derived.largest.get((model, prefill_only))
        if found is None:
            members = self.of_model(model)
            decoding = [m for m in members if prefill_only or m.info.role is not Role.PREFILL]
            decoding = decoding or list(members)
            found = (
                max(m.capacity_tokens for m in decoding),
                max(m.info.block_size for m in decoding),
            )
            self._derived.largest[model, prefill_only] = found
        return found

    def unsupported_fields(self, model: str) -> Collection[tuple[str, ...]]:
        """Return the sampling fields that workers of a model refuse, each list of them once."""
        found = self._derived.unsupported.get(model)
        if found is None:
            found = list(dict.fromkeys(m.info.unsupported_fields for m in self.of_model(model)))
            self._derived.unsupported[model] = found
        return found

    def shortlist(
        self, model: str, adapter: str = "", revision: str | None = None
    ) -> Shortlist | None:
        """Return the sampler of a model's workers that have an adapter and are of a revision. None
        if the model has only a few workers."""
        shortlists = self._derived.shortlists
        if self._roomier:
            for shortlist in shortlists.values():
                if shortlist.is_drawn:
                    shortlist.reopen(self._roomier)
            self._roomier.clear()
        found = shortlists.get((model, adapter, revision))
        if found is None:
            members = [
                m
                for m in self.of_model(model)
                if (not adapter or adapter in m.reported.adapters)
                and (revision is None or m.info.revision == revision)
            ]
            found = Shortlist(members)
            if members:  # clients may invent names, but no workers that have them
                shortlists[model, adapter, revision] = found
        if not adapter and revision is None:
            return None if found.is_short else found
        return None if self.shortlist(model) is None else found

    def candidates(self, model: str) -> list[Candidate]:
        """Return snapshots of the workers of a model for a placement decision. If none is ready,
        suspended workers count as ready, because any worker is better than none."""
        members = self.of_model(model)
        found = [m.snapshot() for m in members]
        if MemberState.READY in [c.state for c in found]:
            return found
        return [m.snapshot(MemberState.READY if m.is_suspect else None) for m in members]

    def has_ready(self, model: str, regions: Regions = None) -> bool:
        """Return True if a worker of `model` is ready in one of these regions."""
        return any(
            m.state is MemberState.READY and may_hold(regions, m.info.topology)
            for m in self.of_model(model)
        )

    def is_last(self, member: Member) -> bool:
        """Return True if no other worker of its model can replace it. Encode workers are always
        replaceable."""
        role = member.info.role
        if role is Role.ENCODE:
            return False
        roles = GENERATING if role in GENERATING else (role,)
        others = self.of_model(member.info.model.name, roles)
        return not any(m.state is MemberState.READY for m in others if m is not member)
