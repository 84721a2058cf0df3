"""The router process: opens its parts in order, by a function of each folder, and closes them."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pdserve.observe.audit import open_audit_log
from pdserve.process.memory import cgroup_limit_bytes
from router.admission.memory import MemoryGuard
from router.api.open import open_grpc, open_http
from router.api.open_requests import OpenRequests
from router.api.shared import open_shared_parts
from router.control import probes
from router.control.adapters import ServedAdapters
from router.control.open import open_control
from router.fleet.open import DEFAULT_FLEET_LIMITS, FleetLimits, open_fleet
from router.fleet.peers import open_peers
from router.guardrails.notes import VerdictNotes
from router.guardrails.open import open_guards
from router.intake.open import open_intake
from router.intake.tokenizers import Tokenizers, fetch_tokenizer
from router.live import LiveConfig
from router.metrics import open_metrics
from router.placement.decisions import RecentRequests
from router.request_path import DEFAULT_PATH_LIMITS, PathLimits, open_request_path
from router.steps.capsule import open_capsules
from router.steps.ledger import open_ledger
from router.store.store import open_store
from router.virtual.chooser import open_chooser

if TYPE_CHECKING:
    from pdserve.config import RouterConfig
    from router.api.open import GrpcEndpoint, HttpEndpoint
    from router.control.weights import WeightUpdates
    from router.fleet.link_pool import LinkPool
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.request_path import RequestPath


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Addresses of the two APIs as host:port."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Times and bounds that have no configuration key. See the functions that get them."""

    probe_period_s: float = probes.PERIOD_S
    fleet: FleetLimits = DEFAULT_FLEET_LIMITS
    path: PathLimits = DEFAULT_PATH_LIMITS


DEFAULT_LIMITS = RouterLimits()


class RouterServer:
    """Owner of all parts of a router. `start` once, then `stop`, in one event loop."""

    def __init__(self, config: RouterConfig, limits: RouterLimits = DEFAULT_LIMITS) -> None:
        self._config = config
        self._limits = limits
        self._stack = AsyncExitStack()
        self._memory = MemoryGuard(int(config.memory_limit_mib * (1 << 20)) or cgroup_limit_bytes())
        self._open_requests = OpenRequests(self._memory)
        self._grpc: GrpcEndpoint | None = None
        self._http: HttpEndpoint | None = None
        self.live: LiveConfig
        self.fleet: Fleet
        self.link_pool: LinkPool
        self.requests: RequestPath
        self.weights: WeightUpdates
        self.metrics: RouterMetrics

    async def start(self) -> RouterAddresses:
        """Start all parts and return the addresses. Raises ConfigError with the key of an address
        that cannot be used; all parts are then closed."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> RouterAddresses:
        config, limits, enter = self._config, self._limits, self._stack.enter_async_context
        router_id, served = f"router-{uuid.uuid4().hex[:12]}", ServedAdapters()
        metrics = await enter(open_metrics(config, self._memory))
        gaps = partial(metrics.histogram, "inter_token_latency_seconds")
        workers = await enter(open_fleet(config, router_id, metrics.count, gaps, limits.fleet))
        adapters = served.by_name
        ledger, peers = await enter(open_ledger(config)), await enter(open_peers(config))
        audit = self._stack.enter_context(open_audit_log(config.log.audit))
        notes = VerdictNotes(metrics, audit, RecentRequests(limits.path.decisions_kept))
        models, fetch = workers.fleet.models, partial(fetch_tokenizer, workers.fleet)
        tokenizers = Tokenizers(models, partial(fetch, workers.dialer, peers))
        guards_of = await enter(open_guards(config, notes, models, tokenizers.get))
        capsules = await enter(open_capsules(config, metrics.count, ledger))
        opening = open_request_path(
            config,
            router_id,
            workers,
            metrics,
            adapters,
            limits.path,
            ledger,
            peers,
            guards_of,
            capsules,
        )
        path = await enter(opening)
        period_s = limits.probe_period_s
        controlled = open_control(config, path, served, probe_period_s=period_s, ledger=ledger)
        control = await enter(controlled)
        store = await enter(open_store(config.store, router_id))
        intake = await enter(open_intake(config, path, store.responses, ledger))
        chooser = await enter(open_chooser(config, path, intake))
        opened = open_shared_parts(
            config, path, intake, chooser, self._open_requests, ledger, audit
        )
        shared = self._stack.enter_context(opened)
        self._grpc = grpc = await enter(open_grpc(config, path, control, shared))
        self._http = http = await enter(open_http(config, path, control, shared, store))
        self.fleet, self.link_pool = workers.fleet, workers.link_pool
        self.metrics, self.requests, self.weights = metrics, path, control.weights
        self.live = LiveConfig(config, path, shared, grpc.guard, http.browsers)
        return RouterAddresses(http=http.address, grpc=grpc.address)

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no more requests, give open ones `grace_s` (the configured one) to end, cut the
        rest, and close everything. Workers stay connected until the last request has ended.
        Idempotent."""
        if self._grpc is not None:
            await self._grpc.health.enter_graceful_shutdown()
        if self._http is not None:
            await self._http.stop_accepting()
        grace_s = self._config.stop_grace_s if grace_s is None else grace_s
        try:
            await self._open_requests.drain(grace_s)
        finally:
            await self._stack.aclose()
