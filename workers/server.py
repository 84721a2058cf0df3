"""A worker: its engine, its listeners and its registrations, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.config import is_exposed
from pdserve.errors import ConfigError, PdserveError
from pdserve.net import rpc
from pdserve.net.framing import MAX_UNSENT_BYTES
from pdserve.net.http_server import HttpServer, bind
from pdserve.net.sockets import join_address
from pdserve.observe.telemetry import open_tracing
from pdserve.security.browsers import BrowserGuard
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import CertificateCollector, dialer, server_context, server_credentials
from pdserve.types import WorkerInfo
from pdserve.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from workers.control import readiness
from workers.control.readiness import Readiness
from workers.control.weights_update import WeightsUpdater
from workers.control.worker_drain import DrainManager, DrainTiming
from workers.control.worker_intake import WorkerIntake
from workers.link.control_rpc import ControlServicer
from workers.link.debug_http import debug_handler
from workers.link.registration import Registrations
from workers.link.router_link import OpenLinks, RouterLink
from workers.link.trainer_calls import TrainerCalls
from workers.make_engine import make_engine
from workers.metering.energy import Unmeasured, meter, nvml_counter, rapl_counter
from workers.metering.gpu_health import Gpus
from workers.service import WorkerService

if TYPE_CHECKING:
    import socket

    import grpc

    from pdserve.config import WorkerConfig
    from workers.engine import Engine, EngineInfo
    from workers.metering.energy import Counter

logger = logging.getLogger(__name__)

GRPC_STOP_S = 2.0
_DRAIN_TIMING = DrainTiming()


class WorkerServer:
    """Owns all parts of a worker. Call `start` once, then `stop`, in one event loop. `instance_id`
    changes at every start. Only tests set the keywords.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        engine: Engine | None = None,
        instance_id: str | None = None,
        drain_timing: DrainTiming = _DRAIN_TIMING,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.instance_id = instance_id or uuid.uuid4().hex
        self.worker_id = config.worker_id or f"{config.role}-{os.getpid()}-{self.instance_id[-6:]}"
        self._config = config
        self._stack = AsyncExitStack()
        self._gpus = Gpus()
        self._guard = make_guard(config.access, shared_with=Party.ROUTER, host=config.host)
        self.links = OpenLinks()
        self.routers = Registrations(config.routers, self.links, dialer=dialer(config.access))
        self._tracing = open_tracing(
            config.otlp_endpoint, service="pdserve-worker", instance=self.worker_id
        )
        self.intake = WorkerIntake(config.role, is_drained=config.warm)
        engine = engine or make_engine(config, self.instance_id)
        self.service = WorkerService(
            engine,
            self.intake,
            renew=self.routers.renew,
            tracing=self._tracing,
        )
        self._new_link = partial(
            RouterLink,
            self.instance_id,
            self.service,
            self.links,
            self._guard,
            max_unsent_bytes=max_unsent_bytes,
        )
        self.drains = DrainManager(self.intake, self.service, self.routers, timing=drain_timing)
        self.weights = WeightsUpdater(
            engine,
            self.intake,
            self.service,
            self.routers,
            allowed=config.weights_directories,
        )
        self.readiness = Readiness(self.intake, self.service, self.routers, self.drains, self._gpus)

    @property
    def info(self) -> WorkerInfo:
        """The registration of this worker. Only once it has started."""
        return self.routers.info

    async def start(self) -> WorkerInfo:
        """Load the model, serve, and begin to register. All parts are closed on an error. Raises
        ConfigError for an address that cannot be used, and the errors of the engine's start.
        """
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> WorkerInfo:
        config, stack = self._config, self._stack
        engine = await self._start_engine()
        session_address = await self._listen_for_routers()
        server, port = self._listen_for_calls()
        debug = None
        if config.debug.host:
            debug = bind(config.debug.host, config.debug.port, key="debug.port")
        counter, energy = self._open_counter(engine.gpus)
        info = self._describe(
            engine,
            energy=energy,
            address=join_address(config.host, port),
            session_address=session_address,
            debug_address=join_address(*debug.getsockname()[:2]) if debug else "",
        )
        await server.start()
        stack.push_async_callback(server.stop, GRPC_STOP_S)
        if debug is not None:
            await self._serve_pages(debug)
        self.routers.start(info, self.readiness.state, self.service.account)
        stack.push_async_callback(self.routers.stop)
        watches = [
            ("gpu-watch", self._gpus.watch(engine.gpus, self.readiness.set_unhealthy)),
            ("health", self.readiness.watch()),
        ]
        if counter is not None:
            watches.append(("energy", meter(counter, self.service.account)))
        for name, watch in watches:
            stack.push_async_callback(_cancel, asyncio.create_task(watch, name=name))
        return info

    async def _start_engine(self) -> EngineInfo:
        """Load the model and the configured adapters."""
        if self._tracing is not None:
            self._stack.push_async_callback(asyncio.to_thread, self._tracing.close)
        self._stack.push_async_callback(self.links.closed)
        self._stack.push_async_callback(self.service.close)
        engine = await self.service.start()
        for name, path in self._config.adapters.items():
            try:
                await self.service.adapters.load(name, path, engine.model.name)
            except PdserveError as error:
                raise ConfigError(
                    f"adapters.{name}: {error.message}", field=f"adapters.{name}"
                ) from error
        return engine

    def _listen_for_calls(self) -> tuple[grpc.aio.Server, int]:
        """Return the gRPC server, which is not started yet, and its port."""
        config = self._config
        server = rpc.make_server(self._guard)
        control = ControlServicer(
            self.routers,
            self.service,
            self.readiness,
            self.drains,
            self.weights,
            adapter_directories=config.adapter_directories,
        )
        add_WorkerServicer_to_server(control, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.readiness.health, server)
        names = (readiness.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        credentials = server_credentials(config.access.tls)
        try:
            return server, rpc.listen(server, join_address(config.host, config.port), credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}", field="port"
            ) from error

    async def _serve_pages(self, debug: socket.socket) -> None:
        shown = (self._gpus, CertificateCollector(self._config.access))
        browsers = BrowserGuard(checks_host=not is_exposed(self._config.debug.host))
        trainers = None
        if self._config.trainer_calls:
            trainers = await self._stack.enter_async_context(TrainerCalls(self._config))
        pages = debug_handler(
            self.service,
            self.intake,
            lambda: self.info,
            shown,
            self.readiness.why_unready,
            browsers,
            trainers,
        )
        web = HttpServer(pages, debug)
        self._stack.push_async_callback(web.stop)
        await web.start()

    def _open_counter(self, gpus: int) -> tuple[Counter | None, str]:
        """Return (energy counter, its name), or (None, why there is none)."""
        if self._config.nodes.count > 1:
            return None, f"not measured: the worker runs on {self._config.nodes.count} nodes"
        counter = nvml_counter(gpus) if gpus else rapl_counter()
        try:
            return self._stack.enter_context(counter), "nvml" if gpus else "rapl"
        except Unmeasured as reason:
            logger.info("energy is not measured: %s", reason)
            return None, f"not measured: {reason}"

    async def _listen_for_routers(self) -> str:
        host, loop = self._config.host, asyncio.get_running_loop()
        context = server_context(self._config.access.tls)
        try:
            server = await loop.create_server(self._new_link, host, 0, ssl=context)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}: {error.strerror or error}", field="host"
            ) from error
        self._stack.callback(self.links.close)
        self._stack.callback(server.close)
        return join_address(*server.sockets[0].getsockname()[:2])

    async def registered(self) -> None:
        """Wait until every listed router knows this worker."""
        await self.routers.registered()
        await self.readiness.report()

    async def stop(self, failure: str = "") -> None:
        """Leave the routers, send queued frames, and close all parts. `failure`: why, unless the
        worker was stopped. Idempotent. Drain first, so that no client notices the stop.
        """
        await self.routers.stop(failure)
        self.drains.close()
        self.weights.close()
        self.intake.close()
        self.links.close()
        await self._stack.aclose()

    def _describe(self, engine: EngineInfo, **texts: str) -> WorkerInfo:
        """Return the registration of this worker."""
        cores = len(os.sched_getaffinity(0))
        return WorkerInfo(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            role=self.intake.role,
            model=engine.model,
            kv=engine.kv,
            block_size=engine.block_size,
            total_blocks=engine.total_blocks,
            limits=engine.limits,
            unsupported_fields=engine.unsupported_fields,
            pid=os.getpid(),
            engine=engine.name,
            settings=engine.settings,
            topology=self._config.topology.labels,
            revision=self._config.revision,
            group=self._config.data_parallel.group,
            device=engine.device,
            devices=engine.gpus or cores,
            cores=cores,
            gpus=self._config.gpus,
            **texts,
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
