"""Links of this router to its workers. Each member of the fleet has one until it is lost."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from pdserve.background import background
from pdserve.errors import WorkerFailed
from pdserve.net.rpc import PLAIN
from router.fleet.worker_link import (
    DEFAULT_LIMITS,
    LinkLimits,
    WorkerLink,
    connect_over_tcp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.net.rpc import Dialer
    from pdserve.observe.metrics import Histogram
    from router.fleet.member import Member
    from router.fleet.prefix_watch import PrefixWatcher
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Connect, Links, Renewals

logger = logging.getLogger(__name__)


class LinkPool:
    """A link to each worker of `fleet` that is not lost.

    An async context manager. Links are open while it is entered. Its exit marks all workers
    as lost, closes the links and waits for their tasks. `suspected`: workers that may hang,
    but stay in use because they are the last ones of their models.

    `renewals`: the renewals of leases that the links have received, for `WorkerLeases`.

    `token_gaps` returns the histogram of gaps between tokens of a model. With `watches`, the prefix
    cache of each worker is indexed.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        router_id: str,
        dialer: Dialer = PLAIN,
        connect: Connect | None = None,
        watches: PrefixWatcher | None = None,
        token_gaps: Callable[[str], Histogram] | None = None,
        limits: LinkLimits = DEFAULT_LIMITS,
    ) -> None:
        self._fleet = fleet
        self.router_id = router_id
        self._dialer = dialer
        self._connect = connect or connect_over_tcp(dialer)
        self._watches = watches
        self._token_gaps = token_gaps
        self._limits = limits
        self._links: dict[Member, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.suspected: set[Member] = set()
        self.renewals: Renewals = asyncio.Queue()
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(background("worker-links", self._follow))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
        self._fleet.close()
        self._reconcile()
        if self._closing:
            await asyncio.wait(self._closing)
        if self._watches is not None:
            await self._watches.aclose()

    @property
    def links(self) -> Links:
        return self._links

    async def _follow(self) -> None:
        while True:
            self._reconcile()
            await self._fleet.membership_change()

    def _reconcile(self) -> None:
        """Open the links of new workers, and close the links of lost ones."""
        for member in [m for m in self._links if m.lost]:
            reason = f"worker {member.worker_id} is gone: {member.gone}"
            logger.info("%s", reason)
            task = self._links.pop(member).close(reason)
            if task is not None:
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for member in self._fleet.members.values():
            if not member.lost and member not in self._links:
                self._links[member] = link = self._open(member)
                link.start()

    def _open(self, member: Member) -> WorkerLink:
        gaps = self._token_gaps
        return WorkerLink(
            member,
            router_id=self.router_id,
            connect=self._connect,
            changed=self._fleet.capacity_changed,
            renewals=self.renewals,
            dialer=self._dialer,
            gaps=None if gaps is None else gaps(member.info.model.name),
            watches=self._watches,
            limits=self._limits,
        )

    def suspend(self, member: Member, reason: str) -> None:
        """Suspend a hanging worker and fail its streams, so that they continue elsewhere."""
        logger.warning("worker %s is suspended: %s", member.worker_id, reason)
        member.breaker.trip(self._fleet.now(), reason)
        self._links[member].drop(WorkerFailed(f"worker {member.worker_id} hangs: {reason}"))

    def suspend_stalled(self) -> None:
        """Suspend stalled workers, except the last ready one of a model, whose streams could not
        continue elsewhere."""
        fleet = self._fleet
        suspected, self.suspected = self.suspected, set()
        for member, link in list(self._links.items()):
            reason = link.stall(fleet.lease_clock.now(), fleet.health.stall_s)
            if not reason:
                continue
            if not fleet.is_last(member):
                self.suspend(member, reason)
                continue
            self.suspected.add(member)
            if member not in suspected:
                logger.warning("the last worker %s may hang: %s", member.worker_id, reason)
