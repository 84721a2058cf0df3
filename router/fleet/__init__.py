"""The pool and the links to its members: applies what the pool's transitions ask for."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Self

from pdserve.config import DetectionConfig
from pdserve.errors import WorkerFailed
from pdserve.kv_pairs import unpaired
from pdserve.rpc import PLAIN
from router.attention import TICK_S, Attention
from router.background import Background
from router.breaker import BreakerLimits
from router.fleet.connection import WorkerConnection, connect_over_tcp
from router.pool import CloseLink, OpenLink, WorkerPool
from router.quarantine import Quarantine
from router.token_gaps import TokenGaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from pdserve.rpc import Dialer
    from pdserve.step_moments import StepMoments
    from pdserve.types import KvReport, WorkerInfo, WorkerLoad
    from router.fleet.connection import Connect, ConnectionSettings
    from router.member import Member
    from router.pool import PoolAction
    from router.prefix import PrefixWatcher

logger = logging.getLogger(__name__)

TICKS_A_SWEEP = 5


class Fleet:
    """Owns the pool, one link a member, one watch of its prefix cache where there are `watches`,
    and the task that ends leases. An async context manager: leaving closes every link and watch and
    waits for it."""

    def __init__(
        self,
        *,
        router_id: str,
        lease_s: float = 5.0,
        quarantine_s: float = 60.0,
        watches: PrefixWatcher | None = None,
        detection: DetectionConfig | None = None,
        link_settings: ConnectionSettings | None = None,
        dialer: Dialer = PLAIN,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._detection = detection = detection or DetectionConfig()
        limits = BreakerLimits(detection.failures, detection.suspend_s, detection.max_suspend_s)
        self.pool = WorkerPool(lease_s, limits)
        self.quarantine = Quarantine(quarantine_s, detection.failures)
        self.dialer = dialer
        self._connect = connect or connect_over_tcp(dialer)
        self._router_id = router_id
        self.watches = watches
        self._link_settings = link_settings
        self._clock = clock
        self._attention = Attention(clock)
        self._links: dict[Member, WorkerConnection] = {}
        # They outlive the members, for a count must not fall.
        self.gaps = TokenGaps()
        self._closing: set[asyncio.Task[None]] = set()
        self._subscribers: list[Callable[[], None]] = []
        self._on_moving: list[Callable[[Member, bool], None]] = []
        self._sweeper = Background("lease-sweeper", self._sweep)

    async def __aenter__(self) -> Self:
        await self._sweeper.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._sweeper.__aexit__(kind, error, trace)
        self._apply(self.pool.close(self.lease_now()))
        if self._closing:
            await asyncio.wait(self._closing)
        if self.watches is not None:
            await self.watches.aclose()

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever a member came, went, or changed its state."""
        self._subscribers.append(on_change)

    def subscribe_moving(self, on_moving: Callable[[Member, bool], None]) -> None:
        """Call `on_moving` as long as what a worker does should go on elsewhere, now and again:
        with True where that may cost something, with False where there is time."""
        self._on_moving.append(on_moving)

    def link(self, member: Member) -> WorkerConnection:
        """The link of a member that is not lost."""
        return self._links[member]

    @property
    def open_streams(self) -> int:
        return sum(link.open_streams for link in self._links.values())

    @property
    def lease_s(self) -> float:
        return self.pool.lease_s

    def now(self) -> float:
        """The clock that breakers and quarantines are counted on."""
        return self._clock()

    def lease_now(self) -> float:
        """The clock that leases are counted on."""
        return self._attention.now()

    def register(self, info: WorkerInfo, *, draining: bool = False) -> None:
        """Raises InvalidRequest where the worker cannot serve beside the others."""
        known = self.pool.members.get(info.worker_id)
        now = self.lease_now()
        actions = self.pool.register(info, now)
        self.pool.renew(info.worker_id, info.instance_id, now, load=None, draining=draining)
        self._apply(actions)
        if known is not self.pool.members[info.worker_id]:
            self._warn_of_unpaired(info)

    def _warn_of_unpaired(self, info: WorkerInfo) -> None:
        others = [m.info for m in self.pool.members.values() if not m.lost and m.info is not info]
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
        moving: bool = False,
    ) -> bool:
        """False where the worker must register."""
        known = self.pool.renew(
            worker_id,
            instance_id,
            self.lease_now(),
            load=load,
            draining=draining,
            kv=kv,
            unhealthy=unhealthy,
        )
        self._changed()
        if known and (moving or draining):
            for on_moving in self._on_moving:
                on_moving(self.pool.members[worker_id], moving)
        return known

    def deregister(self, worker_id: str, instance_id: str) -> None:
        self._apply(self.pool.deregister(worker_id, instance_id, self.lease_now()))

    def attached(self, member: Member) -> None:
        self.pool.attached(member)
        logger.info("%s worker %s is ready", member.info.role, member.worker_id)
        self._changed()

    def detached(self, member: Member) -> None:
        self.pool.detached(member)
        self._changed()

    def reported(self, member: Member, load: WorkerLoad) -> None:
        if self.pool.reported(member, load):
            self._changed()

    def placed(self, member: Member) -> None:
        """Work was submitted to a member."""
        self.pool.placed(member, self._clock())

    def succeeded(self, member: Member) -> None:
        """A member began to answer a request."""
        if self.pool.succeeded(member, self._clock()):
            logger.info("worker %s is given work again", member.worker_id)
            self._changed()

    def failed(self, member: Member, reason: str) -> None:
        """A member's engine failed a request."""
        if self.pool.failed(member, self._clock(), reason):
            logger.warning("worker %s gets no work: %s", member.worker_id, reason)

    def measured(self, member: Member, steps: StepMoments) -> None:
        self.pool.measured(member, steps)

    def _apply(self, actions: Iterable[PoolAction]) -> None:
        for action in actions:
            match action:
                case OpenLink(member):
                    link = WorkerConnection(
                        member,
                        router_id=self._router_id,
                        observer=self,
                        settings=self._link_settings,
                        connect=self._connect,
                        token=self.dialer.token,
                        gaps=self.gaps.of(member.info.model.name),
                    )
                    self._links[member] = link
                    link.start()
                    if self.watches is not None:
                        self.watches.open(member)
                case CloseLink(member, reason):
                    logger.info("%s", reason)
                    self._see_closed(self._links.pop(member).close(reason))
                    if self.watches is not None:
                        self._see_closed(self.watches.close(member))
        self._changed()

    def _see_closed(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _changed(self) -> None:
        for on_change in self._subscribers:
            on_change()

    async def _sweep(self) -> None:
        """End leases, and look for workers that hang."""
        while True:
            for _ in range(TICKS_A_SWEEP):
                await asyncio.sleep(TICK_S)
                self._attention.tick()
            self._apply(self.pool.expire(self.lease_now()))
            self._look_for_stalls()
            if self.pool.let_try(self._clock()):
                self._changed()

    def _look_for_stalls(self) -> None:
        """Take out members that do not get on: their requests go on elsewhere. The last one that is
        ready keeps its own, which have nowhere to go: until it answers, its lease ends, or their
        deadlines pass."""
        now = self.lease_now()
        for member, link in list(self._links.items()):
            why = member.watch.look(
                now,
                frames=link.frames,
                streams=link.open_streams,
                load=member.load,
                stall_s=self._detection.stall_s,
            )
            is_last = bool(why) and self.pool.is_last(member)
            if is_last and not member.watch.is_doubted:
                logger.warning("worker %s may hang, and is the last one: %s", member.worker_id, why)
            member.watch.is_doubted = is_last
            if not why or is_last:
                continue
            logger.warning("worker %s gets no work: %s", member.worker_id, why)
            self.pool.tripped(member, self._clock(), why)
            link.drop(WorkerFailed(f"worker {member.worker_id} hangs: {why}"))
