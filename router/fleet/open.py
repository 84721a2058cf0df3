"""Opens the fleet: its members, the links to them, and the checks of their leases."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdserve.background import background
from pdserve.net.rpc import PLAIN
from pdserve.security.tls import dialer
from router.fleet.billing import Billing
from router.fleet.checks import run_checks
from router.fleet.link_pool import LinkPool
from router.fleet.prefix_watch import PrefixWatcher
from router.fleet.registry import FORGET_AFTER_S, Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.config import RouterConfig
    from pdserve.net.rpc import Dialer
    from pdserve.observe.metrics import Histogram


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Bounds that have no configuration key. `forget_after_s`: seconds that a lost worker stays a
    member."""

    forget_after_s: float = FORGET_AFTER_S
    prefix_blocks: int = 10_000_000  # size of the prefix index; about 100 bytes each


DEFAULT_FLEET_LIMITS = FleetLimits()


@dataclass(frozen=True, slots=True)
class OpenedFleet:
    """The workers of this router. `dialer` opens channels to their gRPC services. `watcher`: index
    of their prefix caches, None without an index."""

    fleet: Fleet
    link_pool: LinkPool
    billing: Billing
    watcher: PrefixWatcher | None = None
    dialer: Dialer = PLAIN


@asynccontextmanager
async def open_fleet(
    config: RouterConfig,
    router_id: str,
    count: Callable[..., None],
    token_gaps: Callable[[str], Histogram],
    limits: FleetLimits = DEFAULT_FLEET_LIMITS,
) -> AsyncIterator[OpenedFleet]:
    """Open the fleet for the context. `count` is RouterMetrics.count. `token_gaps` returns the
    histogram of gaps between tokens of a model."""
    fleet = Fleet(
        lease_s=config.lease_s,
        health=config.health,
        topology=config.topology.labels,
        forget_after_s=limits.forget_after_s,
    )
    billing, watcher = Billing(config.prices, count), PrefixWatcher(limits.prefix_blocks)
    to_workers = dialer(config.access)
    link_pool = LinkPool(
        fleet, router_id=router_id, dialer=to_workers, watches=watcher, token_gaps=token_gaps
    )
    checks = partial(run_checks, fleet, link_pool, billing)
    async with link_pool, background("fleet-checks", checks):
        yield OpenedFleet(fleet, link_pool, billing, watcher, to_workers)
