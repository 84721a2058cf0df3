"""Checks that take workers out of use: their leases, and whether they hang."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.fleet.accounting import WORKER_LOST
from router.fleet.health import TICK_S

if TYPE_CHECKING:
    from router.fleet.accounting import Accounting
    from router.fleet.connections import Connections
    from router.fleet.registry import Fleet

TICKS_PER_CHECK = 5


async def run_checks(fleet: Fleet, connections: Connections, accounting: Accounting) -> None:
    """Tick the clock of leases, and every TICKS_PER_CHECK ticks expire leases and suspend workers
    that hang. Runs until cancelled."""
    while True:
        for _ in range(TICKS_PER_CHECK):
            await asyncio.sleep(TICK_S)
            fleet.lease_clock.tick()
        for member in fleet.expire():
            accounting.wasted(member.info, WORKER_LOST, member.open_s)
        connections.suspend_stalled()
