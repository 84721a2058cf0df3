"""Checks that take workers out of use: expired leases and hanging engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.fleet.billing import WORKER_LOST
from router.fleet.health import TICK_S

if TYPE_CHECKING:
    from router.fleet.billing import Billing
    from router.fleet.link_pool import LinkPool
    from router.fleet.registry import Fleet

TICKS_PER_CHECK = 5


async def run_checks(fleet: Fleet, link_pool: LinkPool, billing: Billing) -> None:
    """Tick the clock of leases, and every TICKS_PER_CHECK ticks expire leases and suspend hanging
    workers. Runs until cancelled."""
    while True:
        for _ in range(TICKS_PER_CHECK):
            await asyncio.sleep(TICK_S)
            fleet.lease_clock.tick()
        for member in fleet.expire():
            billing.wasted(member.info, WORKER_LOST, member.open_s)
        link_pool.suspend_stalled()
