"""Opens the control of workers: health checks, roles, drains and adapters."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdserve.background import background
from pdserve.net.sockets import join_address
from router.control.adapters import Adapters, ServedAdapters
from router.control.audits import Auditor, keep_capsule
from router.control.autoscaler import Autoscaler, role_loads, roles_wanted
from router.control.drain import Drainer, RouterDrainer
from router.control.leases import WorkerLeases
from router.control.probes import PERIOD_S, ActiveHealthChecks
from router.control.role_change import RoleChanger
from router.control.weights import WeightUpdates
from router.steps.ledger import NO_LEDGER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import RouterConfig
    from router.request_path import RequestPath
    from router.steps.ledger import ResidencyLedger


@dataclass(frozen=True, slots=True)
class WorkerControl:
    """Operations on workers for the APIs. `served`: the LoRA adapters that requests may name.
    `auditor`: None without audits."""

    weights: WeightUpdates
    changer: RoleChanger
    autoscaler: Autoscaler
    drainer: Drainer
    router_drainer: RouterDrainer
    adapters: Adapters
    served: ServedAdapters
    leases: WorkerLeases
    auditor: Auditor | None


@asynccontextmanager
async def open_control(
    config: RouterConfig,
    path: RequestPath,
    served: ServedAdapters,
    *,
    probe_period_s: float = PERIOD_S,
    ledger: ResidencyLedger = NO_LEDGER,
) -> AsyncIterator[WorkerControl]:
    """Open the parts for the context, and export their decisions as metrics. `probe_period_s`:
    seconds between two probes of suspended workers and ejected pairs."""
    workers, metrics = path.workers, path.metrics
    fleet, links, dialer = workers.fleet, workers.link_pool.links, workers.dialer
    changer = RoleChanger(fleet, links, dialer, metrics)
    autoscaler = Autoscaler(fleet, path.costs, path.admission, changer, config.roles)
    loads, wanted = (partial(x, autoscaler.verdicts) for x in (role_loads, roles_wanted))
    metrics.watch(fleet, path.admission, workers.watcher, path.shares, loads, wanted)
    metrics.watch_sessions(partial(len, path.sessions))
    metrics.watch_peers(path.peers)
    open_requests, timeout_s = path.open_adapters.count, config.request_timeout_s
    adapters = Adapters(fleet, dialer, served, open_requests, request_timeout_s=timeout_s)
    checks = ActiveHealthChecks(fleet, links, metrics, period_s=probe_period_s)
    owner = f"router {join_address(config.grpc.host, config.grpc.port)}"
    weights = WeightUpdates(fleet, dialer, config.weights, owner, metrics.count)
    leases = WorkerLeases(workers, served, path.generating)
    auditor = _auditor(config, path, ledger)
    async with AsyncExitStack() as stack:
        if auditor is not None:
            await stack.enter_async_context(background("audits", auditor.run))
        stack.push_async_callback(weights.close)
        stack.push_async_callback(adapters.close)
        for name, run in (
            ("leases", leases.renew_over_links),
            ("health-checks", checks.run),
            ("role-autoscaler", autoscaler.run),
            ("adapter-repair", adapters.repair),
            ("weights-repair", weights.repair),
            # Beside the repairs: each takes as long as its worker loads weights.
            ("weights-hold", weights.keep_held),
            ("weights-pause", weights.keep_paused),
        ):
            await stack.enter_async_context(background(name, run))
        yield WorkerControl(
            weights,
            changer,
            autoscaler,
            Drainer(fleet, dialer),
            RouterDrainer(path.peers, path.admission),
            adapters,
            served,
            leases,
            auditor,
        )


def _auditor(config: RouterConfig, path: RequestPath, ledger: ResidencyLedger) -> Auditor | None:
    """Build the auditor, and export its suspects as a metric. Return None without audits."""
    if path.audits is None:
        return None
    workers = path.workers
    auditor = Auditor(
        workers.fleet,
        workers.link_pool.links,
        path.admission,
        path.audits,
        config.audit,
        workers.billing,
        ledger,
        path.metrics.count,
        partial(keep_capsule, path.capsules),
    )
    path.metrics.watch_audits(auditor.suspects)
    return auditor
