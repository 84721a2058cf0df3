"""The router process: builds, starts and stops its parts."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.background import background
from pdserve.config import is_exposed, refuse
from pdserve.errors import ConfigError
from pdserve.net import rpc
from pdserve.net.http_server import HttpServer, bind, raise_file_limit
from pdserve.net.sockets import join_address
from pdserve.observe.metrics import watch_tasks
from pdserve.observe.telemetry import open_tracing
from pdserve.process.entry_points import process_command
from pdserve.security.browsers import BrowserGuard
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import CertificateCollector, dialer, http_context, server_credentials
from pdserve.v1 import admin_pb2, generation_pb2, worker_pb2
from pdserve.v1.admin_pb2_grpc import add_AdminServicer_to_server
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_RegistryServicer_to_server
from router.admission import AdmissionController, AdmissionLimits, Door, Tenants
from router.admission.memory import MediaMemory, MemoryGuard, cgroup_limit_bytes
from router.api.admin import AdminService, RegistryService
from router.api.auth import Keys
from router.api.batch.http import BatchApi
from router.api.batch.runner import BatchRunner
from router.api.body_process import BodyProcesses, LargeBodies
from router.api.console.http import Console
from router.api.console.views import Sources
from router.api.generation import GenerationApi
from router.api.grpc import GenerationService
from router.api.http import HttpApi
from router.api.idempotency import StoredAnswers
from router.api.models import ModelsApi
from router.api.open_requests import OpenRequests
from router.api.openapi import openapi
from router.api.pooling import PoolingApi
from router.api.preprocess import Preprocessor
from router.api.route_table import LINES, ROUTES, Handlers, answer_line
from router.api.status import StatusApi
from router.api.stored_responses import ResponseApi
from router.api.tokenizer import TokenizerApi
from router.fleet.accounting import Accounting
from router.fleet.checks import run_checks
from router.fleet.connections import Connections
from router.fleet.on_demand import OnDemandModels
from router.fleet.prefix_watch import PrefixWatcher
from router.fleet.registry import FORGET_AFTER_S, Fleet
from router.metrics import RouterMetrics, measure_loop_lag
from router.operations import probes
from router.operations.adapters import Adapters, ServedAdapters
from router.operations.autoscaler import Autoscaler, role_loads, roles_wanted
from router.operations.drain import Drainer, RoleChanger
from router.operations.image_fetch import ImageFetcher
from router.operations.probes import ActiveHealthChecks
from router.operations.rendering import ImageRenderer
from router.operations.tokenizers import fetch_tokenizer
from router.placement.cost import MAX_PAIRS, REFIT_S, CostModel
from router.placement.decisions import DecisionLog
from router.placement.policies import POLICIES
from router.placement.revisions import RevisionShares
from router.placement.values import PlacementContext
from router.request.parser_process import ParserProcess
from router.request.parsing import AnswerParser
from router.request.placer import Placer
from router.request.pooling import Embedder
from router.request.prefix_fetch import PrefixFetcher
from router.request.record import RECORDS_KEPT
from router.request.request import RequestServer
from router.request.retry import RetryBudget
from router.request.services import EXPORT_TIMEOUT_S, Services
from router.request.sessions import Sessions
from router.request.suspects import Suspects
from router.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import RouterConfig
    from pdserve.net.rpc import Dialer
    from pdserve.types import Adapter
    from router.fleet.connection import Links

GRPC_STOP_S = 1.0
# Limit of the prompts queued on a worker: this many chunks, or one longer prompt.
PREFILL_CHUNKS_AHEAD = 2
MAX_BODY_BYTES = 32 * 1024 * 1024  # of an HTTP request, or a gRPC message of a client
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["Registry"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Addresses of the two APIs as host:port."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Times and bounds that have no configuration key. See the classes that get them."""

    probe_period_s: float = probes.PERIOD_S
    forget_after_s: float = FORGET_AFTER_S
    export_timeout_s: float = EXPORT_TIMEOUT_S
    refit_s: float = REFIT_S
    max_pairs: int = MAX_PAIRS
    records_kept: int = RECORDS_KEPT
    decisions_kept: int = 1024  # requests whose placement `pdserve explain` shows
    prefix_blocks: int = 10_000_000  # of the prefix index, about 100 bytes each


DEFAULT_LIMITS = RouterLimits()


def make_services(
    config: RouterConfig,
    fleet: Fleet,
    *,
    links: Links,
    metrics: RouterMetrics,
    decisions: DecisionLog,
    accounting: Accounting,
    shares: RevisionShares,
    adapters: Mapping[str, Adapter],
    watcher: PrefixWatcher | None = None,
    bounds: RouterLimits = DEFAULT_LIMITS,
) -> Services:
    """Build the services of the request path. The simulator uses this too."""
    costs = CostModel(
        fleet, config.slo, fleet.now, refit_s=bounds.refit_s, max_pairs=bounds.max_pairs
    )
    limits = AdmissionLimits(
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        queue_timeout_s=config.queue_timeout_s,
        max_ttft_s=config.slo.ttft_s * config.slo.reject_factor,
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
        PlacementContext(watcher, costs, fetches=config.fetch_cached_kv),
        shares=shares,
        costs=costs,
        log=decisions,
        prefill_chunks_ahead=PREFILL_CHUNKS_AHEAD,
    )
    budget, patience_s = RetryBudget(config.retry_tokens_per_s), config.queue_timeout_s
    on_demand = None
    if names := config.on_demand_models:
        limit = config.max_queued_requests
        on_demand = OnDemandModels(names, fleet, adapters, patience_s=patience_s, max_waiting=limit)
    return Services(
        fleet=fleet,
        links=links,
        admission=admission,
        placer=placer,
        costs=costs,
        metrics=metrics,
        accounting=accounting,
        budget=budget,
        suspects=Suspects(fleet, links, config.max_worker_deaths),
        sessions=Sessions(fleet.now, idle_s=config.session_idle_s),
        media_memory=MediaMemory(config.images.memory_mib << 20, config.images.disk_mib << 20),
        adapters=adapters,
        fetcher=PrefixFetcher(fleet, links, costs, metrics),
        queue_timeout_s=patience_s,
        on_demand=on_demand,
        export_timeout_s=bounds.export_timeout_s,
    )


class RouterServer:
    """Owner of all parts of a router. `start` once, then `stop`, in one event loop."""

    def __init__(self, config: RouterConfig, limits: RouterLimits = DEFAULT_LIMITS) -> None:
        self._config = config
        self._limits = limits
        self._stack = AsyncExitStack()
        self._batches = AsyncExitStack()
        self._memory = MemoryGuard(int(config.memory_limit_mib * (1 << 20)) or cgroup_limit_bytes())
        self._open_requests = OpenRequests(self._memory)
        self._health = health.aio.HealthServicer()
        self._http: HttpServer | None = None
        self.shares = RevisionShares()
        self._served = ServedAdapters()
        self._dialer: Dialer
        self.fleet: Fleet
        self.connections: Connections
        self.requests: RequestServer
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
        config, router_id = self._config, f"router-{uuid.uuid4().hex[:12]}"
        self.metrics = metrics = RouterMetrics(config.slo)
        accounting = Accounting(config.prices, metrics.count)
        watcher = PrefixWatcher(self._limits.prefix_blocks)
        decisions = DecisionLog(self._limits.decisions_kept)
        self._dialer = dialer(config.access)
        await self._open_fleet(router_id, accounting, watcher)
        links = self.connections.links
        services = make_services(
            config,
            self.fleet,
            links=links,
            metrics=metrics,
            decisions=decisions,
            accounting=accounting,
            shares=self.shares,
            adapters=self._served.by_name,
            watcher=watcher,
            bounds=self._limits,
        )
        self.requests = await self._open_requests_of(services, router_id)
        changer = RoleChanger(self.fleet, links, self._dialer, metrics)
        autoscaler = Autoscaler(
            self.fleet, services.costs, services.admission, changer, config.roles
        )
        await self._open_operations(services, autoscaler, watcher)
        return await self._open_apis(services, decisions, changer, autoscaler, router_id)

    async def _open_fleet(
        self, router_id: str, accounting: Accounting, watcher: PrefixWatcher
    ) -> None:
        config, enter = self._config, self._stack.enter_async_context
        self.fleet = fleet = Fleet(
            lease_s=config.lease_s,
            health=config.health,
            topology=config.topology.labels,
            forget_after_s=self._limits.forget_after_s,
        )
        self.connections = connections = await enter(
            Connections(
                fleet,
                router_id=router_id,
                dialer=self._dialer,
                watches=watcher,
                token_gaps=partial(self.metrics.histogram, "inter_token_latency_seconds"),
            )
        )
        checks = partial(run_checks, fleet, connections, accounting)
        await enter(background("fleet-checks", checks))
        links, period_s = connections.links, self._limits.probe_period_s
        active = ActiveHealthChecks(fleet, links, self.metrics, period_s=period_s)
        await enter(background("health-checks", active.run))

    async def _open_requests_of(self, services: Services, router_id: str) -> RequestServer:
        config = self._config
        tracing = open_tracing(config.otlp_endpoint, service="pdserve-router", instance=router_id)
        if tracing is not None:
            self._stack.push_async_callback(asyncio.to_thread, tracing.close)
        parser = ParserProcess(self.metrics, config.parser_command or process_command("parser"))
        self._stack.push_async_callback(parser.close)
        requests = RequestServer(
            services, tracing, AnswerParser(parser), records_kept=self._limits.records_kept
        )
        admitting = background("admit-queued-requests", requests.admit_queued)
        await self._stack.enter_async_context(admitting)
        return requests

    async def _open_operations(
        self, services: Services, autoscaler: Autoscaler, watcher: PrefixWatcher
    ) -> None:
        """Start the autoscaler of roles, and what watches this process."""
        metrics, enter = self.metrics, self._stack.enter_async_context
        await enter(background("role-autoscaler", autoscaler.run))
        roles = autoscaler.verdicts
        loads, wanted = partial(role_loads, roles), partial(roles_wanted, roles)
        metrics.watch(self.fleet, services.admission, watcher, self.shares, loads, wanted)
        metrics.watch_sessions(services.sessions)
        watch_tasks(metrics.registry)
        metrics.watch_memory(self._memory)
        await enter(background("memory", self._memory.run))
        metrics.registry.register(CertificateCollector(self._config.access))
        lag = metrics.histogram("event_loop_lag_seconds").observe
        await enter(background("event-loop-lag", partial(measure_loop_lag, lag)))

    async def _open_apis(
        self,
        services: Services,
        decisions: DecisionLog,
        changer: RoleChanger,
        autoscaler: Autoscaler,
        router_id: str,
    ) -> RouterAddresses:
        config, enter = self._config, self._stack.enter_async_context
        fleet, requests, metrics = self.fleet, self.requests, self.metrics
        opened = self._open_requests
        keys = Keys(config.tenants, config.access, http_host=config.http_host)
        fetcher = await enter(ImageFetcher(config.images.url_hosts))
        images = ImageRenderer(fleet, self._dialer, fetcher, services.media_memory, metrics)
        self._stack.push_async_callback(images.close)
        preprocessor = Preprocessor(
            requests.models,
            requests.adapters,
            services.on_demand,
            timeout_s=config.request_timeout_s,
            load=partial(fetch_tokenizer, fleet, self._dialer),
            render=images.render,
            tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._stack.callback(preprocessor.close)
        await enter(background("tokenizers", preprocessor.preload_tokenizers))
        processes = BodyProcesses(metrics, most=config.body_processes)
        self._stack.push_async_callback(processes.close)
        large = LargeBodies(preprocessor, processes)
        door = Door(services.admission.tenants, fleet.now, metrics.refused)
        drainer = Drainer(fleet, self._dialer)
        grpc_address = await self._start_grpc(
            GenerationService(requests, preprocessor, opened, door=door, large=large, keys=keys),
            RegistryService(
                fleet,
                requests,
                accounting=services.accounting,
                adapters=self._served,
                shares=self.shares,
                costs=services.costs,
                on_demand=services.on_demand,
                roles=autoscaler.verdicts if config.roles.auto else {},
                loads=autoscaler.loads,
            ),
            AdminService(
                fleet,
                log=decisions,
                drainer=drainer,
                shares=self.shares,
                roles=changer,
                metrics=metrics,
            ),
        )
        sources = Sources(
            fleet=fleet,
            log=requests.log,
            decisions=decisions,
            admission=services.admission,
            costs=services.costs,
            verdicts=autoscaler.verdicts,
            changer=changer,
            drainer=drainer,
            slo=config.slo,
            on_demand=services.on_demand,
            sessions=services.sessions,
        )
        adapters = Adapters(
            fleet,
            self._dialer,
            self._served,
            requests.open_adapters.__getitem__,
            request_timeout_s=config.request_timeout_s,
        )
        self._stack.push_async_callback(adapters.close)
        await enter(background("adapter-repair", adapters.repair))
        store = await enter(open_store(config, router_id))
        embedder = Embedder(
            fleet,
            links=services.links,
            admission=services.admission,
            metrics=metrics,
            accounting=services.accounting,
            suspects=services.suspects,
        )
        # A router without a store of its own name is alone: its memory knows all keys.
        answers = StoredAnswers(store.keys if config.store else None)
        await enter(background("taken-over-requests", partial(answers.end_taken_over, opened)))
        responses = ResponseApi(store.responses, metrics)
        handlers = Handlers(
            generation=GenerationApi(
                requests,
                preprocessor,
                opened,
                large=large,
                door=door,
                responses=responses,
                answers=answers,
            ),
            responses=responses,
            pooling=PoolingApi(embedder, preprocessor, opened, large=large, door=door),
            tokenizer=TokenizerApi(preprocessor, large, door),
            models=ModelsApi(requests, adapters),
            batches=BatchApi(
                store.files,
                store.batches,
                max_file_bytes=config.batch.max_file_mib << 20,
                endpoints=LINES,
            ),
            status=StatusApi(requests, opened, metrics.render, partial(openapi, ROUTES)),
            console=Console(sources, keys, opened),
        )
        browsers = BrowserGuard(config.cors_origins, config.allowed_hosts, checks_host=keys.is_open)
        runner = BatchRunner(
            store.files,
            store.batches,
            partial(answer_line, handlers),
            max_line_bytes=MAX_BODY_BYTES,
        )
        await self._batches.enter_async_context(background("batches", runner.run))
        self._stack.push_async_callback(self._batches.aclose)
        http_address = await self._start_http(HttpApi(handlers, keys, browsers))
        return RouterAddresses(http=http_address, grpc=grpc_address)

    async def _start_grpc(
        self, generation: GenerationService, registry: RegistryService, admin: AdminService
    ) -> str:
        config = self._config
        host, access = config.grpc_host, config.access
        guard = make_guard(access, shared_with=Party.WORKER, host=host)
        if guard is None and config.tenants and is_exposed(host) and not access.open_control:
            refuse(
                "router.access.worker_token_file",
                f"is required with tenants: whoever can reach {host} could register a worker and "
                "get their prompts. Set it or access.tls.ca_file (or access.open_control: true)",
            )
        server = rpc.make_server(guard, max_message_bytes=MAX_BODY_BYTES)
        add_GenerationServicer_to_server(generation, server)
        add_RegistryServicer_to_server(registry, server)
        add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            address = join_address(host, config.grpc_port)
            port = rpc.listen(server, address, server_credentials(access.tls))
        except RuntimeError as error:
            text = f"cannot listen on {host} port {config.grpc_port}"
            raise ConfigError(text, field="grpc_port") from error
        await server.start()
        self._stack.push_async_callback(server.stop, GRPC_STOP_S)
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return join_address(host, port)

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
        return join_address(config.http_host, sockets[0].getsockname()[1])

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
