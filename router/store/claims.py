"""Leases of routers, so that the claims of dead routers can be taken over.

A router that holds claims increments a counter in its row once a second. Other routers measure on
their own monotonic clocks how long the counter stays the same. Leases therefore need no common
clock and survive clock steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import delete, select

from router.store.database import StoreUnavailable, insert
from router.store.schema import routers

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from router.store.database import Database

logger = logging.getLogger(__name__)

LEASE_S = 6.0
BEAT_S = 1.0
# Longest silence counted per check, because no router can renew while the database is unavailable.
_LONGEST_LOOK_S = 2.0
_FORGET_S = 7 * 86_400.0


class _Seen(NamedTuple):
    beats: int | None
    looked_at: float
    silent_s: float


class Claims:
    """The claims of this router, which `run` renews, and the silence of other routers."""

    def __init__(
        self,
        database: Database,
        owner: str,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` is the id of this router. It must differ after each start, or the
        claims of the earlier start would count as alive."""
        self.owner = owner
        self._database, self._lease_s, self._clock = database, lease_s, clock
        self._held: set[str] = set()
        self._seen: dict[str, _Seen] = {}

    async def run(self) -> None:
        """Renew the claims until cancelled."""
        while True:
            if self._held:  # a router without claims writes nothing
                try:
                    await self._database.write(self._beat)
                except StoreUnavailable as error:
                    logger.warning("cannot renew the claims of this router: %s", error)
            await asyncio.sleep(BEAT_S)

    def _beat(self, db: Connection) -> None:
        now = self._database.now()
        row = insert(db.dialect.name, routers).values(id=self.owner, beats=1, seen_at=now)
        changes = {"beats": routers.c.beats + 1, "seen_at": now}
        db.execute(row.on_conflict_do_update(index_elements=["id"], set_=changes))

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    def hold(self, claim: str) -> None:
        """Renew the lease until `release`."""
        self._held.add(claim)

    def release(self, claim: str) -> None:
        self._held.discard(claim)

    def is_dead(self, db: Connection, owner: str) -> bool:
        """Return True if a router has been silent for a lease, measured over several calls."""
        if not owner:
            return True  # not claimed yet
        if owner == self.owner:
            return False
        beats, now = db.scalar(select(routers.c.beats).where(routers.c.id == owner)), self._clock()
        last = self._seen.get(owner)
        silent_s = 0.0
        if last is not None and last.beats == beats:
            silent_s = last.silent_s + min(now - last.looked_at, _LONGEST_LOOK_S)
        self._seen[owner] = _Seen(beats, now, silent_s)
        return silent_s >= self._lease_s

    async def sweep(self) -> None:
        """Delete the rows of routers that renewed nothing for days, whose claims were taken over
        long ago."""
        old = delete(routers).where(routers.c.seen_at < self._database.now() - _FORGET_S)
        await self._database.write(lambda db: db.execute(old))
