"""The router as one process: membership, coordinator and both faces, started and stopped."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve import rpc
from pdserve.access.guard import Party, guards
from pdserve.access.tls import dialer, http_context, server_credentials
from pdserve.errors import ConfigError
from pdserve.http_server import HttpServer, bind, connection_limit
from pdserve.metrics import watch_tasks
from pdserve.telemetry import open_tracing
from pdserve.v1 import admin_pb2, generation_pb2, worker_pb2
from pdserve.v1.admin_pb2_grpc import add_AdminServicer_to_server
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_RegistryServicer_to_server
from router.admission import AdmissionLimits, Tenants
from router.api.auth import Keys
from router.api.grpc import Generation
from router.api.http import HttpApi
from router.api.open_requests import OpenRequests
from router.api.preprocess import Preprocessor
from router.canaries import Canaries
from router.coordinator import Coordinator
from router.cost.book import CostBook
from router.cost.objective import slo_of
from router.decisions.log import DecisionLog
from router.decisions.service import Admin
from router.drains import Drains
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.placement.policies.by_name import POLICIES
from router.prefill_queue import PrefillQueue
from router.prefix import PrefixWatcher
from router.registry import Registry
from router.roles.flips import Flips
from router.roles.rebalancer import Rebalancer
from router.roles.watcher import RoleWatcher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import RouterConfig
    from router.roles.controller import Verdict

GRPC_STOP_S = 1.0
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["Registry"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Where the two faces listen: host:port."""

    http: str
    grpc: str


class RouterServer:
    """Owns everything of a router. `start` once, then `stop`; all in one event loop. `watches` is
    what it knows of the workers' prefix caches, None before the start and where it keeps none."""

    def __init__(self, config: RouterConfig) -> None:
        self.watches: PrefixWatcher | None = None
        self._config = config
        self._stack = AsyncExitStack()
        self._open_requests = OpenRequests()
        self._health = health.aio.HealthServicer()
        self._http: HttpServer | None = None
        self.coordinator: Coordinator
        self.fleet: Fleet

    async def start(self) -> RouterAddresses:
        """Serve. Raises ConfigError naming the key where an address cannot be had; nothing is left
        behind then."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> RouterAddresses:
        config = self._config
        router_id = f"router-{uuid.uuid4().hex[:12]}"
        self.fleet = fleet = await self._open_fleet(router_id)
        metrics = RouterMetrics()
        slo = slo_of(config.slo)
        costs = CostBook(fleet.pool, slo, fleet.now, on_ratio=metrics.predicted)
        decisions = DecisionLog(config.decision_log_size)
        metrics.watch_costs(costs, fleet.pool)
        tracing = open_tracing(
            config.otlp_endpoint,
            service="pdserve-router",
            instance=router_id,
            share=config.trace_share,
        )
        if tracing is not None:
            self._stack.push_async_callback(asyncio.to_thread, tracing.close)
        self.coordinator = coordinator = Coordinator(
            fleet,
            tracing=tracing,
            metrics=metrics,
            costs=costs,
            limits=AdmissionLimits(
                config.max_running_requests,
                config.max_queued_requests,
                config.queue_timeout_s,
                slo.latest_ttft_s,
            ),
            tenants=Tenants.of(config.tenants),
            prefill_queue=PrefillQueue(config.prefill_chunks_ahead),
            request_timeout_s=config.request_timeout_s,
            policy=POLICIES[config.policy],
            fallback=config.fallback,
            decisions=decisions,
        )
        if config.detection.probe_s:
            await self._stack.enter_async_context(
                Canaries(fleet, metrics, idle_s=config.detection.probe_s)
            )
        preprocessor = Preprocessor(
            coordinator.models, timeout_s=config.request_timeout_s, why_none=fleet.pool.why_none
        )
        keys = Keys(config.tenants)
        http_api = HttpApi(
            coordinator,
            preprocessor,
            self._open_requests,
            coordinator.metrics.render,
            started=int(time.time()),
            keys=keys,
        )
        generation = Generation(coordinator, preprocessor, self._open_requests, keys)
        flips = Flips(fleet, coordinator.metrics)
        admin = Admin(decisions, flips, Drains(fleet))
        roles = await self._start_rebalancer(fleet, flips, costs)
        grpc_address = await self._start_grpc(generation, Registry(fleet, costs, roles), admin)
        http_address = await self._start_http(http_api)
        return RouterAddresses(http=http_address, grpc=grpc_address)

    async def _open_fleet(self, router_id: str) -> Fleet:
        config, dials = self._config, dialer(self._config.access)
        if config.prefix_max_blocks:
            self.watches = PrefixWatcher(
                router_id,
                max_blocks=config.prefix_max_blocks,
                dialer=dials,
            )
        fleet = Fleet(
            router_id=router_id,
            watches=self.watches,
            lease_s=config.lease_s,
            dialer=dials,
            quarantine_s=config.quarantine_s,
            detection=config.detection,
        )
        return await self._stack.enter_async_context(fleet)

    async def _start_rebalancer(
        self, fleet: Fleet, flips: Flips, costs: CostBook
    ) -> Mapping[str, Verdict]:
        """Its verdicts; none where roles are not moved by load."""
        if not self._config.roles.auto:
            return {}
        metrics = self.coordinator.metrics.roles
        watcher = RoleWatcher(
            fleet,
            costs,
            self._config.roles,
            queued=self.coordinator.queued_of,
            on_verdict=metrics.decided,
        )
        metrics.watch(watcher.verdicts)
        rebalancer = Rebalancer(watcher, flips, self._config.roles)
        await self._stack.enter_async_context(rebalancer)
        return watcher.verdicts

    async def _start_grpc(self, generation: Generation, registry: Registry, admin: Admin) -> str:
        host, access = self._config.grpc_host, self._config.access
        credentials = server_credentials(access.tls)
        server = rpc.make_server(
            guards(access, shared_with=Party.WORKER), max_message_bytes=self._config.max_body_bytes
        )
        add_GenerationServicer_to_server(generation, server)
        add_RegistryServicer_to_server(registry, server)
        add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            port = rpc.listen(server, _join(host, self._config.grpc_port), credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host} port {self._config.grpc_port}", field="grpc_port"
            ) from error
        await server.start()
        self._stack.push_async_callback(server.stop, GRPC_STOP_S)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return _join(host, port)

    async def _start_http(self, api: HttpApi) -> str:
        host = self._config.http_host
        watch_tasks(self.coordinator.metrics.registry)
        tls = http_context(self._config.access.http_tls)
        sockets = [bind(host, self._config.http_port)]
        self._stack.callback(sockets[0].close)
        port: int = sockets[0].getsockname()[1]
        if shared := self._config.shared_http_port:
            sockets.append(bind(host, shared, key="shared_http_port", is_shared=True))
        self._http = HttpServer(
            api.handle,
            *sockets,
            tls=tls,
            max_connections=connection_limit(self._config.max_connections),
            max_body_bytes=self._config.max_body_bytes,
        )
        self._stack.push_async_callback(self._http.stop)
        await self._http.start()
        return _join(host, port)

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no more work, give open requests `grace_s` (the configured one) to end, cut the
        rest, and close everything. Workers stay attached until the last request has ended.
        Idempotent."""
        await self._health.enter_graceful_shutdown()
        if self._http is not None:
            self._http.stop_listening()
        try:
            await self._open_requests.drain(
                self._config.stop_grace_s if grace_s is None else grace_s
            )
        finally:
            await self._stack.aclose()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
