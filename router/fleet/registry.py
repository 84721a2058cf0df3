"""The fleet: which workers there are, their connections, and the checks that take them out of use.

Workers register with every router and renew a lease; routers share nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from pdserve.config import HealthConfig
from pdserve.errors import WorkerFailed
from pdserve.kv_pairs import unpaired
from pdserve.rpc import PLAIN
from router.background import background
from router.fleet.connection import WorkerConnection, connect_over_tcp
from router.fleet.health import TICK_S, BreakerLimits, OutlierEjection, PausingClock
from router.fleet.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.metrics import Histogram
    from pdserve.rpc import Dialer
    from pdserve.step_moments import StepMoments
    from pdserve.types import KvReport, WorkerInfo, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from router.fleet.connection import Connect, ConnectionSettings
    from router.fleet.member import Member
    from router.prefix import PrefixWatcher

logger = logging.getLogger(__name__)

TICKS_PER_CHECK = 5


class Fleet:
    """Owns the pool, a connection to each worker, and the task that ends leases and finds stalls.

    `token_gaps` returns the histogram of a model's gaps between tokens. With `watches` the prefix
    cache of each worker is indexed. An async context manager: leaving closes all connections and
    waits for their tasks.
    """

    def __init__(
        self,
        *,
        router_id: str,
        lease_s: float = 5.0,
        ejection_s: float = 60.0,
        watches: PrefixWatcher | None = None,
        health: HealthConfig | None = None,
        settings: ConnectionSettings | None = None,
        dialer: Dialer = PLAIN,
        connect: Connect | None = None,
        token_gaps: Callable[[str], Histogram] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._health = health = health or HealthConfig()
        limits = BreakerLimits(open_s=health.eject_s)
        self.pool = WorkerPool(lease_s, limits)
        self.outliers = OutlierEjection(ejection_s, limits.failures)
        self.dialer = dialer
        self._connect = connect or connect_over_tcp(dialer)
        self.watches = watches
        self._token_gaps = token_gaps
        self._router_id = router_id
        self._settings = settings
        self._clock = clock
        self._lease_clock = PausingClock(clock)
        self._links: dict[Member, WorkerConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(background("fleet-checks", self._check))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
        self.pool.close(self.lease_now())
        self._reconcile()
        if self._closing:
            await asyncio.wait(self._closing)
        if self.watches is not None:
            await self.watches.aclose()

    async def capacity_change(self, *, until: float | None = None) -> bool:
        """Wait until a worker came, changed its state or has more room. Return False at the loop
        time `until`."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def capacity_changed(self) -> None:
        """Wake the tasks that wait in `capacity_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def link(self, member: Member) -> WorkerConnection:
        """The connection of a worker that is not lost."""
        return self._links[member]

    @property
    def open_streams(self) -> int:
        return sum(link.open_streams for link in self._links.values())

    @property
    def lease_s(self) -> float:
        return self.pool.lease_s

    def now(self) -> float:
        """The clock of breakers."""
        return self._clock()

    def lease_now(self) -> float:
        """The clock of leases."""
        return self._lease_clock.now()

    def register(self, info: WorkerInfo, *, draining: bool = False) -> None:
        """Raises InvalidRequest if the worker cannot serve beside the others."""
        known = self.pool.members.get(info.worker_id)
        now = self.lease_now()
        self.pool.register(info, now)
        self.pool.renew(info.worker_id, info.instance_id, now, load=None, draining=draining)
        self._reconcile()
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
    ) -> bool:
        """Return False if the worker must register."""
        known = self.pool.members.get(worker_id)
        before = None if known is None else (known.state, known.foreign_blocks)
        member = self.pool.renew(
            worker_id,
            instance_id,
            self.lease_now(),
            load=load,
            draining=draining,
            kv=kv,
            unhealthy=unhealthy,
        )
        if member is not None and (member.state, member.foreign_blocks) != before:
            self.capacity_changed()
        return member is not None

    def deregister(self, worker_id: str, instance_id: str) -> None:
        self.pool.deregister(worker_id, instance_id, self.lease_now())
        self._reconcile()

    def attached(self, member: Member) -> None:
        self.pool.attached(member)
        logger.info("%s worker %s is ready", member.info.role, member.worker_id)
        if self.watches is not None:
            self._links[member].watch_cache()
        self.capacity_changed()

    def detached(self, member: Member) -> None:
        self.pool.detached(member)
        if self.watches is not None:
            self.watches.forget(member)
        self.capacity_changed()

    def reported(self, member: Member, load: WorkerLoad) -> None:
        if self.pool.reported(member, load):
            self.capacity_changed()

    def measured(self, member: Member, steps: StepMoments) -> None:
        """The worker reported what its steps cost."""
        member.steps = steps

    def cache_changed(self, member: Member, update: w.CacheUpdate) -> None:
        """The worker reported blocks of its prefix cache."""
        if self.watches is not None and self.watches.apply(member, update):
            self._links[member].watch_cache()

    def placed(self, member: Member) -> None:
        """A request was sent to a worker."""
        self.pool.placed(member, self._clock())

    def succeeded(self, member: Member) -> None:
        """A worker began to answer a request."""
        if self.pool.succeeded(member, self._clock()):
            logger.info("worker %s is given requests again", member.worker_id)
            self.capacity_changed()

    def failed(self, member: Member, reason: str) -> None:
        """The engine of a worker failed a request."""
        if self.pool.failed(member, self._clock(), reason):
            logger.warning("worker %s is suspended: %s", member.worker_id, reason)

    def _reconcile(self) -> None:
        """Open the connections of new workers, and close those of lost ones."""
        changed = False
        for member in [m for m in self._links if m.lost]:
            reason = f"worker {member.worker_id} is gone: {member.gone}"
            logger.info("%s", reason)
            self._wait_for(self._links.pop(member).close(reason))
            changed = True
        for member in self.pool.members.values():
            if member.lost or member in self._links:
                continue
            gaps = self._token_gaps
            link = self._links[member] = WorkerConnection(
                member,
                router_id=self._router_id,
                observer=self,
                settings=self._settings,
                connect=self._connect,
                token=self.dialer.token,
                gaps=None if gaps is None else gaps(member.info.model.name),
            )
            link.start()
            changed = True
        if changed:
            self.capacity_changed()

    def _wait_for(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _check(self) -> None:
        while True:
            for _ in range(TICKS_PER_CHECK):
                await asyncio.sleep(TICK_S)
                self._lease_clock.tick()
            self.pool.expire(self.lease_now())
            self._reconcile()
            self._find_stalls()
            if self.pool.end_suspensions(self._clock()):
                self.capacity_changed()

    def _find_stalls(self) -> None:
        """Suspend workers that hang, and fail their streams. The last ready worker keeps its own:
        they have nowhere to go."""
        now = self.lease_now()
        for member, link in list(self._links.items()):
            why = member.stalls.check(
                now,
                frames=link.frames,
                streams=link.open_streams,
                load=member.load,
                stall_s=self._health.stall_s,
            )
            is_last = bool(why) and self.pool.is_last(member)
            if is_last and not member.stalls.is_suspected:
                logger.warning("the last worker %s may hang: %s", member.worker_id, why)
            member.stalls.is_suspected = is_last
            if why and not is_last:
                logger.warning("worker %s is suspended: %s", member.worker_id, why)
                self.pool.stalled(member, self._clock(), why)
                link.drop(WorkerFailed(f"worker {member.worker_id} hangs: {why}"))
