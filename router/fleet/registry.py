"""The fleet: which workers there are, their connections, and the checks that take them out of use.

    register ──► connecting ⇄ ready ──► draining
                     │          │           │
                     └──── lost (lease expired, replaced, deregistered) ──► forgotten

Workers register with every router and renew a lease; routers share nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from pdserve.config import HealthConfig
from pdserve.errors import InvalidRequest, WorkerFailed
from pdserve.kv_pairs import unpaired
from pdserve.rpc import PLAIN
from pdserve.types import Role
from router.accounting import WORKER_LOST
from router.background import background
from router.fleet.connection import WorkerConnection, connect_over_tcp
from router.fleet.health import TICK_S, Breaker, OutlierEjection, PausingClock
from router.fleet.member import Member
from router.placement.topology import apart
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.metrics import Histogram
    from pdserve.rpc import Dialer
    from pdserve.types import Account, Adapter, KvReport, ModelInfo, WorkerInfo, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from router.accounting import Accounting
    from router.fleet.connection import Connect
    from router.placement.revisions import Shares
    from router.placement.topology import Topology
    from router.placement.values import Candidate
    from router.prefix import PrefixWatcher

logger = logging.getLogger(__name__)

TICKS_PER_CHECK = 5
FORGET_AFTER_S = 60.0
# Damaged KV ejects a pair for this many times the ejection of a worker.
PAIR_FACTOR = 6


# What workers of one model must have in common.
SAME_OF_A_MODEL = ("vocab_size", "max_model_len", "aliases", "sampling_defaults", "tokenizer")


class Fleet:
    """State: `members` by worker id, a connection to each that is not lost, and the LoRA adapters
    that are served, by name: `adapters`. Reports do not change those in `changing`, which this
    router loads or unloads now. `shares` has those of new requests that revisions get, by model.

    `token_gaps` returns the histogram of a model's gaps between tokens. With `watches` the prefix
    cache of each worker is indexed. `clock` is the event loop's by default, `topology` has
    the router's labels. An async context
    manager: inside, connections are open and leases end; leaving it closes all connections and
    waits for their tasks.
    """

    def __init__(
        self,
        *,
        router_id: str,
        lease_s: float = 5.0,
        watches: PrefixWatcher | None = None,
        health: HealthConfig | None = None,
        dialer: Dialer = PLAIN,
        connect: Connect | None = None,
        token_gaps: Callable[[str], Histogram] | None = None,
        clock: Callable[[], float] | None = None,
        topology: Topology | None = None,
        accounting: Accounting | None = None,
    ) -> None:
        self.topology = topology or {}
        self.members: dict[str, Member] = {}
        self.adapters: dict[str, Adapter] = {}
        self.changing: set[str] = set()
        self.lease_s = lease_s
        self.health = health or HealthConfig()
        self.shares: dict[str, Shares] = {}
        self.outliers = OutlierEjection(PAIR_FACTOR * self.health.eject_s)
        self.dialer = dialer
        self.now = clock or asyncio.get_running_loop().time
        self.lease_clock = PausingClock(self.now)
        self._connect = connect or connect_over_tcp(dialer)
        self._watches = watches
        self._token_gaps = token_gaps
        self._accounting = accounting
        self._router_id = router_id
        self.slots = 0  # requests that the engines of all workers run at once
        self._by_model: dict[tuple[str, bool], list[Member]] = {}
        self._largest: dict[tuple[str, bool], tuple[int, int]] = {}
        self._models: dict[str, ModelInfo] = {}
        self._links: dict[Member, WorkerConnection] = {}
        self._is_open = False
        self._closing: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Event | None = None  # while somebody waits
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._is_open = True
        self._reconcile()
        await self._exits.enter_async_context(background("fleet-checks", self._check))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
        self.close()
        if self._closing:
            await asyncio.wait(self._closing)
        if self._watches is not None:
            await self._watches.aclose()

    def close(self) -> None:
        """Lose every worker."""
        for member in self.members.values():
            if not member.lost:
                self._lose(member, "the router is closing")
        self._reconcile()

    # -- Changes that tasks wait for

    async def capacity_change(self, *, until: float | None = None) -> bool:
        """Wait until a worker came, changed its state or has more room. Return False at the loop
        time `until`."""
        if self._changed is None:
            self._changed = asyncio.Event()
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def capacity_changed(self) -> None:
        """Wake the tasks that wait in `capacity_change`."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # -- Membership

    def lease_now(self) -> float:
        return self.lease_clock.now()

    def register(
        self, info: WorkerInfo, *, draining: bool = False, adapters: Collection[Adapter] = ()
    ) -> None:
        """Add a worker, or renew it if this start of it is known.

        Raises InvalidRequest, naming the field, if it cannot serve beside the others, or if a later
        start of it has registered: a late message must not replace that.
        """
        self._check_compatible(info)
        known = self.members.get(info.worker_id)
        if known is not None and not known.lost:
            if info.instance_id == known.replaced:
                raise InvalidRequest(
                    f"worker {info.worker_id}: a later start of it has registered",
                    field="worker_id",
                )
            if known.info != info:
                self._lose(known, "it registered again")
                if known.info.instance_id != info.instance_id:
                    self._waste_open(known)
        if known is None or known.lost:
            self._add(info, known)
        self.renew(
            info.worker_id, info.instance_id, load=None, draining=draining, adapters=adapters
        )
        self._reconcile()

    def _check_compatible(self, info: WorkerInfo) -> None:
        if info.role in (Role.PREFILL, Role.DECODE) and info.kv is None:
            raise InvalidRequest(
                f"worker {info.worker_id}: a {info.role} worker needs a kv endpoint",
                field="worker.kv",
            )
        for other in self.members.values():
            if other.lost or other.worker_id == info.worker_id:
                continue
            if other.info.model.name != info.model.name:
                if shared := set(info.model.names) & set(other.info.model.names):
                    raise InvalidRequest(
                        f"worker {info.worker_id}: {sorted(shared)} is a name of model "
                        f"{other.info.model.name} on worker {other.worker_id}",
                        field="worker.model.aliases",
                    )
                continue
            for name in SAME_OF_A_MODEL:
                ours, theirs = getattr(info.model, name), getattr(other.info.model, name)
                if ours != theirs:
                    raise InvalidRequest(
                        f"worker {info.worker_id}: model {info.model.name} has {name} {ours}, but "
                        f"{theirs} on worker {other.worker_id}",
                        field=f"worker.model.{name}",
                    )

    def _add(self, info: WorkerInfo, before: Member | None) -> None:
        away = apart(self.topology, info.topology)
        member = Member(info, breaker=Breaker(self.health.eject_s), away=away)
        if before is not None and before.info.instance_id != info.instance_id:
            member.replaced = before.info.instance_id
        self.members[info.worker_id] = member
        self._forget_views()
        others = [m.info for m in self.members.values() if not m.lost and m is not member]
        for pair in unpaired([info, *others]):
            if info in (pair.prefill, pair.decode):
                logger.warning(
                    "%s and %s cannot exchange KV and will not be paired: %s",
                    pair.prefill.worker_id,
                    pair.decode.worker_id,
                    pair.reason,
                )

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
    ) -> bool:
        """Extend a lease. Return False if this start of the worker must register. A report that was
        not sent leaves the last one as it is."""
        member = self._current(worker_id, instance_id)
        if member is None:
            return False
        before = member.state
        member.lease_end = self.lease_now() + self.lease_s
        member.draining, member.unhealthy, member.gpus = draining, unhealthy, gpus
        if load is not None:
            self.reported(member, load)
        if kv is not None:
            member.kv = kv
        self._take_account(member, account)
        self._report_adapters(member, {adapter.key: adapter for adapter in adapters})
        if member.state != before:
            self.capacity_changed()
        return True

    def _report_adapters(self, member: Member, adapters: dict[str, Adapter]) -> None:
        """An adapter that a worker reports for the first time is served. One that a worker reports
        no more is not: another router unloads it. A revision is served until no worker has it."""
        before, member.adapters = member.adapters, adapters
        gone = before.keys() - adapters.keys()
        for name in {(before | adapters)[key].name for key in before.keys() ^ adapters.keys()}:
            if name in self.changing:
                continue
            reported = [x.adapters for x in self.members.values() if not x.lost]
            found = {key: x for each in reported for key, x in each.items() if x.name == name}
            served = self.adapters.pop(name, None)
            if served is not None and (served.key in found or not found):
                found = {served.key: served} | found  # without a worker, it waits for one
            left = [x for key, x in found.items() if key not in gone]
            if left:
                self.adapters[name] = left[0]
        if before.keys() != adapters.keys():
            self.capacity_changed()

    def _take_account(self, member: Member, account: Account | None) -> None:
        if account is not None:
            member.open_s, member.busy_s = account.open_s, account.busy_s
            if self._accounting is not None:
                self._accounting.reported(member.info, account)

    def _waste_open(self, member: Member) -> None:
        """What requests had taken of a worker that has died is lost."""
        if self._accounting is not None:
            self._accounting.wasted(member.info, WORKER_LOST, member.open_s)
        member.open_s = 0.0

    def deregister(self, worker_id: str, instance_id: str, account: Account | None = None) -> None:
        """The worker leaves; unknown workers are ignored."""
        member = self._current(worker_id, instance_id)
        if member is not None:
            self._take_account(member, account)
            self._lose(member, "it left")
            self._reconcile()

    def expire(self) -> None:
        """Lose the workers whose lease is over, and forget those lost for a while."""
        now = self.lease_now()
        for member in list(self.members.values()):
            if not member.lost and now >= member.lease_end:
                self._lose(member, "its lease expired")
                self._waste_open(member)
            elif member.lost and now - member.lease_end >= FORGET_AFTER_S:
                del self.members[member.worker_id]
                self._forget_views()
        self._reconcile()

    def _current(self, worker_id: str, instance_id: str) -> Member | None:
        member = self.members.get(worker_id)
        if member is None or member.lost or member.info.instance_id != instance_id:
            return None
        return member

    def _lose(self, member: Member, why: str) -> None:
        member.lost, member.attached, member.gone = True, False, why
        member.lease_end = self.lease_now()
        self._forget_views()

    def _forget_views(self) -> None:
        self._by_model.clear()
        self._largest.clear()
        self._models = {}
        self.slots = sum(m.info.max_num_seqs for m in self.members.values() if not m.lost)

    # -- Connections

    def link(self, member: Member) -> WorkerConnection:
        """The connection of a worker that is not lost."""
        return self._links[member]

    @property
    def open_streams(self) -> int:
        return sum(link.open_streams for link in self._links.values())

    def _reconcile(self) -> None:
        """Open the connections of new workers, and close those of lost ones."""
        if not self._is_open:
            return
        lost = [m for m in self._links if m.lost]
        new = [m for m in self.members.values() if not m.lost and m not in self._links]
        for member in lost:
            reason = f"worker {member.worker_id} is gone: {member.gone}"
            logger.info("%s", reason)
            task = self._links.pop(member).close(reason)
            if task is not None:
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for member in new:
            gaps = self._token_gaps
            link = self._links[member] = WorkerConnection(
                member,
                router_id=self._router_id,
                observer=self,
                connect=self._connect,
                token=self.dialer.token,
                gaps=None if gaps is None else gaps(member.info.model.name),
            )
            link.start()
        if lost or new:
            self.capacity_changed()

    def attached(self, member: Member) -> None:
        """The connection to a worker is up."""
        if member.lost:
            return
        member.attached = True
        logger.info("%s worker %s is ready", member.info.role, member.worker_id)
        if self._watches is not None:
            self._links[member].watch_cache()
        self.capacity_changed()

    def detached(self, member: Member) -> None:
        """The connection is down: the state of the engine is unknown."""
        member.attached = False
        member.load = member.kv = None
        member.foreign_blocks = 0
        if self._watches is not None:
            self._watches.forget(member)
        self.capacity_changed()

    def reported(self, member: Member, load: WorkerLoad) -> None:
        if member.reported(load):
            self.capacity_changed()

    def cache_changed(self, member: Member, update: w.CacheUpdate) -> None:
        """The worker reported blocks of its prefix cache."""
        if self._watches is not None:
            self._watches.apply(member, update)

    # -- Health

    def succeeded(self, member: Member) -> None:
        """A worker began to answer a request."""
        member.breaker.success()

    def failed(self, member: Member, reason: str) -> None:
        """The engine of a worker failed a request."""
        if member.breaker.failure(self.now(), reason):
            logger.warning("worker %s is suspended: %s", member.worker_id, reason)

    def stalled(self, member: Member, reason: str) -> None:
        """A worker hangs: its streams fail."""
        logger.warning("worker %s is suspended: %s", member.worker_id, reason)
        member.breaker.trip(self.now(), reason)
        self._links[member].drop(WorkerFailed(f"worker {member.worker_id} hangs: {reason}"))

    def probed(self, member: Member) -> None:
        """A probe was answered: a suspended worker gets requests again."""
        logger.info("worker %s is given requests again", member.worker_id)
        member.breaker.close()
        self.capacity_changed()

    async def _check(self) -> None:
        while True:
            for _ in range(TICKS_PER_CHECK):
                await asyncio.sleep(TICK_S)
                self.lease_clock.tick()
            self.expire()
            self._find_stalls()

    def _find_stalls(self) -> None:
        """The last ready worker keeps its streams, since they have nowhere to go."""
        for member, link in list(self._links.items()):
            why = member.stalls.check(
                self.lease_now(),
                frames=link.frames,
                streams=link.open_streams,
                load=member.load,
                stall_s=self.health.stall_s,
            )
            is_last = bool(why) and self.is_last(member)
            if is_last and not member.stalls.is_suspected:
                logger.warning("the last worker %s may hang: %s", member.worker_id, why)
            member.stalls.is_suspected = is_last
            if why and not is_last:
                self.stalled(member, why)

    # -- Views

    def models(self) -> Mapping[str, ModelInfo]:
        """Return the models of all workers by name. The model of a lost worker stays until that is
        forgotten: requests wait for its return."""
        if not self._models:
            members = sorted(self.members.values(), key=lambda m: not m.lost)
            self._models = {m.info.model.name: m.info.model for m in members}
        return self._models

    def of_model(self, name: str) -> Sequence[Member]:
        """Return the workers of a model that generate, lost ones too, in the order of
        registration."""
        return self._of_model(name, is_pooling=False)

    def pooling(self, name: str) -> Sequence[Member]:
        """Return the workers of a model that compute embeddings, lost ones too."""
        return self._of_model(name, is_pooling=True)

    def _of_model(self, name: str, *, is_pooling: bool) -> Sequence[Member]:
        found = self._by_model.get((name, is_pooling))
        if found is None:
            members = [m for m in self.members.values() if m.info.model.name == name]
            found = [m for m in members if (m.info.role is Role.POOLING) == is_pooling]
            if found:
                self._by_model[name, is_pooling] = found
        return found

    def largest(self, model: str, *, prefill_only: bool) -> tuple[int, int]:
        """Return the most tokens that a worker of a model holds, and the largest block size.
        Prefill workers count only with `prefill_only`, or if there are no others."""
        found = self._largest.get((model, prefill_only))
        if found is None:
            members = self.of_model(model)
            able = [m for m in members if prefill_only or m.info.role is not Role.PREFILL]
            able = able or list(members)
            found = max(m.capacity_tokens for m in able), max(m.info.block_size for m in able)
            self._largest[model, prefill_only] = found
        return found

    def candidates(self, model: str) -> list[Candidate]:
        """Return the workers of a model as a placement decision sees them. If none is ready,
        suspended workers count as ready: there is nowhere else to go."""
        members = self.of_model(model)
        found = [m.seen() for m in members]
        if MemberState.READY in [c.state for c in found]:
            return found
        return [m.seen(MemberState.READY if m.is_suspect else None) for m in members]

    def has_ready(self, model: str) -> bool:
        return any(m.state is MemberState.READY for m in self.of_model(model))

    def is_last(self, member: Member) -> bool:
        """Return whether no other worker of its model is ready."""
        is_pooling = member.info.role is Role.POOLING
        others = self._of_model(member.info.model.name, is_pooling=is_pooling)
        return not any(m.state is MemberState.READY for m in others if m is not member)
