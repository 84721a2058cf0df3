"""Opens the servers of gRPC and HTTP, each with what answers its calls."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.background import background
from pdserve.config import is_exposed, refuse
from pdserve.errors import ConfigError
from pdserve.net import rpc
from pdserve.net.http_server import HttpServer, bind, raise_file_limit
from pdserve.net.sockets import join_address
from pdserve.security.browsers import BrowserGuard
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import http_context, server_credentials
from pdserve.v1 import admin_pb2, generation_pb2, peer_pb2, worker_pb2
from pdserve.v1.admin_pb2_grpc import add_AdminServicer_to_server
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from pdserve.v1.peer_pb2_grpc import add_PeerServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_RegistryServicer_to_server
from router.api.admin import AdminService, RegistryService
from router.api.batch.http import BatchApi
from router.api.batch.runner import BatchRunner
from router.api.console.http import Console
from router.api.generation import GenerationApi
from router.api.grpc import GenerationService
from router.api.http import HttpApi
from router.api.idempotency import StoredAnswers
from router.api.models import ModelsApi
from router.api.openapi import openapi
from router.api.peer import PeerService
from router.api.pooling_endpoints import PoolingApi
from router.api.route_table import LINES, ROUTES, Handlers, answer_line
from router.api.status import StatusApi
from router.api.stored_responses import ResponseApi
from router.api.tokenizer import TokenizerApi
from router.api.weights import WeightsApi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import RouterConfig
    from pdserve.security.roles import Guard
    from router.api.shared import SharedParts
    from router.control.open import WorkerControl
    from router.request_path import RequestPath
    from router.store.store import Store

MAX_BODY_BYTES = 32 * 1024 * 1024  # of an HTTP request, or a gRPC message of a client
GRPC_STOP_S = 1.0
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["Registry"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name,
)


@dataclass(frozen=True, slots=True)
class GrpcEndpoint:
    """The gRPC server at `address`. `guard`: None if it checks no roles."""

    address: str
    guard: Guard | None
    health: health.aio.HealthServicer


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """The HTTP server at `address`. `batches`: ends the work on them."""

    address: str
    server: HttpServer
    browsers: BrowserGuard
    batches: AsyncExitStack

    async def stop_accepting(self) -> None:
        """Stop accepting requests. Idempotent."""
        # Another router, or this one's successor, runs the unanswered lines again.
        await self.batches.aclose()
        self.server.stop_listening()


@asynccontextmanager
async def open_grpc(
    config: RouterConfig, path: RequestPath, control: WorkerControl, shared: SharedParts
) -> AsyncIterator[GrpcEndpoint]:
    """Serve gRPC for the context. Raises ConfigError with the key of an address that cannot be
    used."""
    autoscaler, remarks = control.autoscaler, shared.intake.remarks
    guard, status = _make_guard(config), health.aio.HealthServicer()
    server = rpc.make_server(guard, max_message_bytes=MAX_BODY_BYTES)
    generation = GenerationService(path.models, shared)
    add_GenerationServicer_to_server(generation, server)
    registry = RegistryService(path, autoscaler, control.leases, remarks, control.auditor)
    add_RegistryServicer_to_server(registry, server)
    add_AdminServicer_to_server(AdminService(path, control, shared.audit), server)
    add_PeerServicer_to_server(PeerService(path, shared), server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    host, port = config.grpc.host, config.grpc.port
    try:
        port = rpc.listen(server, join_address(host, port), server_credentials(config.access.tls))
    except RuntimeError as error:
        text = f"cannot listen on {host} port {port}; is it in use? See --grpc-port"
        raise ConfigError(text, field="grpc.port") from error
    await server.start()
    try:
        for name in ("", *_SERVICES):
            await status.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield GrpcEndpoint(join_address(host, port), guard, status)
    finally:
        await server.stop(GRPC_STOP_S)


def _make_guard(config: RouterConfig) -> Guard | None:
    host, access = config.grpc.host, config.access
    guard = make_guard(access, shared_with=Party.WORKER, host=host)
    if guard is None and config.tenants and is_exposed(host) and not access.open_control:
        refuse(
            "router.access.worker_token_file",
            f"is required with tenants: any client of {host} could register a worker and "
            "get their prompts. Set it or access.tls.ca_file (or access.open_control: true)",
        )
    return guard


@asynccontextmanager
async def open_http(
    config: RouterConfig,
    path: RequestPath,
    control: WorkerControl,
    shared: SharedParts,
    store: Store,
) -> AsyncIterator[HttpEndpoint]:
    """Serve HTTP for the context, and work on batches. Raises ConfigError with the key of an
    address that cannot be used."""
    # A router without a store of its own name is alone: its memory knows all keys.
    answers = StoredAnswers(store.keys if config.store.database else None)
    responses, files = ResponseApi(store.responses, path.metrics), store.files
    opened, keys, models = shared.open_requests, shared.keys, path.models
    most = config.store.max_file_mib << 20
    handlers = Handlers(
        generation=GenerationApi(shared, responses, answers),
        responses=responses,
        pooling=PoolingApi(path.embedder, path.embeddings, shared),
        tokenizer=TokenizerApi(shared),
        models=ModelsApi(models, control.adapters, shared),
        weights=WeightsApi(
            control.weights,
            path.workers.fleet,
            shared.audit,
            is_on=bool(config.weights.directories),
        ),
        batches=BatchApi(
            files,
            store.batches,
            max_file_bytes=most,
            endpoints=LINES,
            residency=shared.intake.residency,
            ledger=shared.ledger,
        ),
        status=StatusApi(models, path.peers, opened, path.metrics.render, partial(openapi, ROUTES)),
        console=Console(path, control, shared),
    )
    http = config.http
    browsers = BrowserGuard(http.cors_origins, http.allowed_hosts, checks_host=keys.is_open)
    api = HttpApi(handlers, shared.calls, keys, browsers)
    answer = partial(answer_line, handlers)
    runner = BatchRunner(files, store.batches, answer, max_line_bytes=MAX_BODY_BYTES)
    async with AsyncExitStack() as stack:
        end_taken_over = partial(answers.end_taken_over, opened)
        await stack.enter_async_context(background("taken-over-requests", end_taken_over))
        batches = await stack.enter_async_context(AsyncExitStack())
        await batches.enter_async_context(background("batches", runner.run))
        raise_file_limit()
        sockets = [bind(http.host, http.port)]
        stack.callback(sockets[0].close)
        if port := http.shared_port:
            sockets.append(bind(http.host, port, key="http.shared_port", is_shared=True))
        tls = http_context(config.access.http_tls)
        server = HttpServer(api.handle, *sockets, tls=tls, max_body_bytes=MAX_BODY_BYTES)
        stack.push_async_callback(server.stop)
        await server.start()
        address = join_address(http.host, sockets[0].getsockname()[1])
        yield HttpEndpoint(address, server, browsers, batches)
