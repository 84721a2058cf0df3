"""The router as one process: everything it consists of, started and stopped."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve import rpc
from pdserve.errors import ConfigError
from pdserve.http_server import HttpServer, bind, raise_file_limit
from pdserve.metrics import watch_tasks
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import dialer, http_context, server_credentials
from pdserve.telemetry import open_tracing
from pdserve.v1 import admin_pb2, generation_pb2, worker_pb2
from pdserve.v1.admin_pb2_grpc import add_AdminServicer_to_server
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_RegistryServicer_to_server
from router.accounting import Accounting
from router.adapters import Adapters
from router.admin import AdminService, RegistryService
from router.admission import AdmissionController, AdmissionLimits, Tenants
from router.api.auth import Keys
from router.api.batches import BatchApi
from router.api.console import Console
from router.api.grpc import Generation
from router.api.http import HttpApi
from router.api.open_requests import OpenRequests
from router.api.pooling import PoolingApi
from router.api.preprocess import Preprocessor
from router.api.responses import ResponseApi
from router.background import background
from router.batch.runner import BatchRunner
from router.batch.store import BatchStore
from router.console import Sources
from router.decisions import DecisionLog
from router.fleet.registry import Fleet
from router.health_checks import ActiveHealthChecks
from router.metrics import RouterMetrics
from router.on_demand import OnDemandModels
from router.operations import RoleChanger
from router.parser_process import ParserProcess
from router.parsing import AnswerParser
from router.placement.cost import CostModel
from router.placement.policies import POLICIES
from router.placement.values import PlacementContext
from router.placer import Placer
from router.pooling import Embedder
from router.prefix import PrefixWatcher
from router.request import RequestServer, Services
from router.retry import RetryBudget
from router.roles import Autoscaler, role_loads, roles_wanted
from router.tokenizers import fetch_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import BatchConfig, RouterConfig

GRPC_STOP_S = 1.0
# Prompts that a worker is given ahead: so many chunks, or one longer prompt.
PREFIX_BLOCKS = 2_000_000  # of the prefix index, about 100 bytes each
DECISIONS_KEPT = 1024  # requests whose placement `pdserve explain` shows
PREFILL_CHUNKS_AHEAD = 2
MAX_BODY_BYTES = 8 * 1024 * 1024  # of an HTTP request, or a gRPC message of a client
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["Registry"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Where the two APIs listen: host:port."""

    http: str
    grpc: str


def make_services(
    config: RouterConfig,
    fleet: Fleet,
    metrics: RouterMetrics,
    decisions: DecisionLog,
    accounting: Accounting,
    watcher: PrefixWatcher | None = None,
) -> Services:
    """Return what requests are served with. The simulator uses this too."""
    costs = CostModel(fleet, config.slo, fleet.now)
    limits = AdmissionLimits(
        config.max_running_requests,
        config.max_queued_requests,
        config.queue_timeout_s,
        config.slo.ttft_s * config.slo.reject_factor,
    )
    admission = AdmissionController(
        limits,
        tenants=Tenants(config.tenants),
        latency=costs,
        slots=partial(attrgetter("slots"), fleet),
        clock=fleet.now,
    )
    placer = Placer(
        fleet,
        POLICIES[config.policy],
        PlacementContext(watcher, costs),
        costs=costs,
        log=decisions,
        prefill_chunks_ahead=PREFILL_CHUNKS_AHEAD,
    )
    budget, patience_s = RetryBudget(config.retry_tokens_per_s), config.queue_timeout_s
    on_demand = None
    if names := config.on_demand_models:
        limit = config.max_queued_requests
        on_demand = OnDemandModels(names, fleet, patience_s=patience_s, max_waiting=limit)
    return Services(
        *(fleet, admission, placer, costs, metrics, accounting, budget, patience_s, on_demand)
    )


class RouterServer:
    """Owns everything of a router. `start` once, then `stop`, in one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._batches = AsyncExitStack()
        self._open_requests = OpenRequests()
        self._health = health.aio.HealthServicer()
        self._http: HttpServer | None = None
        self.fleet: Fleet
        self.requests: RequestServer
        self.metrics: RouterMetrics

    async def start(self) -> RouterAddresses:
        """Raises ConfigError naming the key of an address that cannot be used; nothing is left
        behind then."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> RouterAddresses:
        config, enter = self._config, self._stack.enter_async_context
        router_id = f"router-{uuid.uuid4().hex[:12]}"

        # The fleet.
        self.metrics = metrics = RouterMetrics(config.slo)
        accounting = Accounting(config.prices, metrics.count)
        watcher = PrefixWatcher(PREFIX_BLOCKS)
        self.fleet = fleet = await enter(
            Fleet(
                router_id=router_id,
                watches=watcher,
                lease_s=config.lease_s,
                dialer=dialer(config.access),
                health=config.health,
                topology=config.topology.labels,
                accounting=accounting,
                token_gaps=partial(metrics.histogram, "inter_token_latency_seconds"),
            )
        )
        checks = ActiveHealthChecks(fleet, metrics)
        await enter(background("health-checks", checks.run))

        # The request path.
        decisions = DecisionLog(DECISIONS_KEPT)
        services = make_services(config, fleet, metrics, decisions, accounting, watcher)
        costs, admission = services.costs, services.admission
        tracing = open_tracing(config.otlp_endpoint, service="pdserve-router", instance=router_id)
        if tracing is not None:
            self._stack.push_async_callback(asyncio.to_thread, tracing.close)
        parser = ParserProcess(metrics)
        self._stack.push_async_callback(parser.close)
        self.requests = requests = RequestServer(services, tracing, AnswerParser(parser, metrics))
        await enter(background("admit-queued-requests", requests.admit_queued))

        # LoRA adapters.
        adapters = Adapters(
            fleet,
            requests.open_adapters.__getitem__,
            request_timeout_s=config.request_timeout_s,
        )
        self._stack.push_async_callback(adapters.close)
        await enter(background("adapter-repair", adapters.repair))

        # Role changes.
        changer = RoleChanger(fleet, metrics)
        autoscaler = Autoscaler(fleet, costs, admission, changer, config.roles)
        await enter(background("role-autoscaler", autoscaler.run))
        roles = autoscaler.verdicts
        loads, wanted = partial(role_loads, roles), partial(roles_wanted, roles)
        metrics.watch(fleet, admission, watcher, loads, wanted)
        watch_tasks(metrics.registry)

        # The APIs.
        keys, opened = Keys(config.tenants, config.access), self._open_requests
        preprocessor = Preprocessor(
            requests.models,
            requests.adapters,
            services.on_demand,
            timeout_s=config.request_timeout_s,
            load=partial(fetch_tokenizer, fleet),
            tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        grpc_address = await self._start_grpc(
            Generation(requests, preprocessor, opened, keys),
            RegistryService(
                *(fleet, requests, costs, services.on_demand),
                roles if config.roles.auto else {},
                autoscaler.loads,
            ),
            AdminService(decisions, fleet, changer, metrics),
        )
        sources = Sources(
            *(fleet, requests.log, decisions, admission, costs, roles, changer, config.slo),
            services.on_demand,
        )
        store = await enter(_batch_store(config.batch, router_id))
        http_api = HttpApi(
            *(requests, preprocessor, opened, metrics.render, adapters, keys, config.cors_origins),
            BatchApi(store, config.batch.max_file_mib << 20),
            Console(sources, keys, opened, config.http_host),
            responses=ResponseApi(store),
            pooling=PoolingApi(Embedder(fleet, admission, metrics, accounting), preprocessor),
        )
        runner = BatchRunner(store, http_api.answer)
        await self._batches.enter_async_context(background("batches", runner.run))
        self._stack.push_async_callback(self._batches.aclose)
        return RouterAddresses(http=await self._start_http(http_api), grpc=grpc_address)

    async def _start_grpc(
        self, generation: Generation, registry: RegistryService, admin: AdminService
    ) -> str:
        config = self._config
        host, access = config.grpc_host, config.access
        server = rpc.make_server(
            make_guard(access, shared_with=Party.WORKER), max_message_bytes=MAX_BODY_BYTES
        )
        add_GenerationServicer_to_server(generation, server)
        add_RegistryServicer_to_server(registry, server)
        add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            address = _join(host, config.grpc_port)
            port = rpc.listen(server, address, server_credentials(access.tls))
        except RuntimeError as error:
            text = f"cannot listen on {host} port {config.grpc_port}"
            raise ConfigError(text, field="grpc_port") from error
        await server.start()
        self._stack.push_async_callback(server.stop, GRPC_STOP_S)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return _join(host, port)

    async def _start_http(self, api: HttpApi) -> str:
        config = self._config
        raise_file_limit()
        sockets = [bind(config.http_host, config.http_port)]
        self._stack.callback(sockets[0].close)
        if shared := config.shared_http_port:
            sockets.append(bind(config.http_host, shared, key="shared_http_port", is_shared=True))
        self._http = HttpServer(
            api.handle,
            *sockets,
            tls=http_context(config.access.http_tls),
            max_body_bytes=MAX_BODY_BYTES,
        )
        self._stack.push_async_callback(self._http.stop)
        await self._http.start()
        return _join(config.http_host, sockets[0].getsockname()[1])

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no more requests, give open ones `grace_s` (the configured one) to end, cut the
        rest, and close everything. Workers stay connected until the last request has ended.
        Idempotent."""
        await self._health.enter_graceful_shutdown()
        # Lines without an answer are asked again by another router, or by the next.
        await self._batches.aclose()
        if self._http is not None:
            self._http.stop_listening()
        grace_s = self._config.stop_grace_s if grace_s is None else grace_s
        try:
            await self._open_requests.drain(grace_s)
        finally:
            await self._stack.aclose()


@asynccontextmanager
async def _batch_store(config: BatchConfig, router_id: str) -> AsyncIterator[BatchStore]:
    with ExitStack() as stack:
        folder = config.directory
        if not folder:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-batches-"))
        store = await asyncio.to_thread(BatchStore, Path(folder), router_id)
        try:
            yield store
        finally:
            await store.close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
