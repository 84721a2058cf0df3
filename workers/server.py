"""A worker: its engine, its listeners and its registrations, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.config import is_exposed
from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.net import rpc
from pdserve.net.framing import MAX_UNSENT_BYTES
from pdserve.net.http_server import HttpServer, bind
from pdserve.net.sockets import join_address
from pdserve.observe.telemetry import open_tracing
from pdserve.security.browsers import BrowserGuard
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import CertificateCollector, dialer, server_context, server_credentials
from pdserve.types import WorkerInfo
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from workers.debug_http import debug_handler
from workers.drain import DrainManager, DrainTiming
from workers.engines import make_engine
from workers.intake import Intake
from workers.metering.energy import Unmeasured, meter, nvml_counter, rapl_counter
from workers.metering.gpu_health import Gpus
from workers.registration import Registrations
from workers.service import WorkerService
from workers.servicer import ControlServicer
from workers.state import WorkerState

if TYPE_CHECKING:
    from pdserve.config import WorkerConfig
    from workers.engine import Engine, EngineInfo
    from workers.metering.energy import Counter

logger = logging.getLogger(__name__)

GRPC_STOP_S = 2.0
_DRAIN_TIMING = DrainTiming()
_SERVICE = w.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServer:
    """Owns everything of a worker. Call `start` once, then `stop`, in one event loop.

    `instance_id` changes at every start. Only tests give the keywords.
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
        # Done when an operator asked over the network that the process end.
        self.told_to_stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._config = config
        self._stack = AsyncExitStack()
        self._health = health.aio.HealthServicer()
        self._gpus = Gpus()
        self._is_stopping = False
        self._is_out = config.warm  # drained by an operator or a signal, or from the start
        self._unhealthy = ""  # the fault of the machine
        self._guard = make_guard(config.access, shared_with=Party.ROUTER, host=config.host)
        self.routers = Registrations(config.routers, dialer=dialer(config.access))
        self._tracing = open_tracing(
            config.otlp_endpoint, service="pdserve-worker", instance=self.worker_id
        )
        self.intake = Intake(config.role, is_drained=config.warm)
        self.service = WorkerService(
            engine or make_engine(config, self.instance_id),
            self.intake,
            self.instance_id,
            renew=self.routers.renew,
            guard=self._guard,
            tracing=self._tracing,
            max_unsent_bytes=max_unsent_bytes,
        )
        self.drains = DrainManager(self.intake, self.service, self.routers, timing=drain_timing)
        self._control = ControlServicer(
            self, self.service, self.drains, adapter_directories=config.adapter_directories
        )

    @property
    def info(self) -> WorkerInfo:
        """The registration of this worker. Only once it has started."""
        return self.routers.info

    async def start(self) -> WorkerInfo:
        """Load the model, serve, and begin to register. Nothing is left behind on an error.

        Raises ConfigError for an address that cannot be used, and what the engine's start raises.
        """
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> WorkerInfo:
        config, stack = self._config, self._stack
        if self._tracing is not None:
            stack.push_async_callback(asyncio.to_thread, self._tracing.close)
        stack.push_async_callback(self.service.close)
        engine = await self.service.start()
        for name, path in config.adapters.items():
            try:
                await self.service.adapters.load(name, path, engine.model.name)
            except PdserveError as error:
                raise ConfigError(
                    f"adapters.{name}: {error.message}", field=f"adapters.{name}"
                ) from error
        session_address = await self._listen_for_sessions()
        server = rpc.make_server(self._guard)
        credentials = server_credentials(config.access.tls)
        try:
            port = rpc.listen(server, join_address(config.host, config.port), credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}", field="port"
            ) from error
        debug = None
        if config.debug_host:
            debug = bind(config.debug_host, config.debug_port, key="debug_port")
        counter, energy = self._open_counter(engine.gpus)
        info = self._describe(
            engine,
            energy=energy,
            address=join_address(config.host, port),
            session_address=session_address,
            debug_address=join_address(*debug.getsockname()[:2]) if debug else "",
        )
        add_WorkerServicer_to_server(self._control, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await server.start()
        stack.push_async_callback(server.stop, GRPC_STOP_S)
        if debug is not None:
            shown = (self._gpus, CertificateCollector(config.access))
            browsers = BrowserGuard(checks_host=not is_exposed(config.debug_host))
            pages = debug_handler(
                self.service, self.intake, lambda: self.info, shown, self.unready, browsers
            )
            web = HttpServer(pages, debug)
            stack.push_async_callback(web.stop)
            await web.start()
        self.routers.start(info, self.state, self.service.account)
        stack.push_async_callback(self.routers.stop)
        watches = [
            ("gpu-watch", self._gpus.watch(engine.gpus, self.set_unhealthy)),
            ("health", self._watch_health()),
        ]
        if counter is not None:
            watches.append(("energy", meter(counter, self.service.account)))
        for name, watch in watches:
            stack.push_async_callback(_cancel, asyncio.create_task(watch, name=name))
        return info

    def _open_counter(self, gpus: int) -> tuple[Counter | None, str]:
        """Return the counter of energy, and its name or why there is none."""
        if self._config.nnodes > 1:
            return None, f"not measured: the worker runs on {self._config.nnodes} nodes"
        counter = nvml_counter(gpus) if gpus else rapl_counter()
        try:
            return self._stack.enter_context(counter), "nvml" if gpus else "rapl"
        except Unmeasured as reason:
            logger.info("energy is not measured: %s", reason)
            return None, f"not measured: {reason}"

    async def _listen_for_sessions(self) -> str:
        host, loop = self._config.host, asyncio.get_running_loop()
        context = server_context(self._config.access.tls)
        try:
            server = await loop.create_server(self.service.new_session, host, 0, ssl=context)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}: {error.strerror or error}", field="host"
            ) from error
        self._stack.callback(server.close)
        return join_address(*server.sockets[0].getsockname()[:2])

    async def registered(self) -> None:
        """Wait until every router that is listed knows this worker."""
        await self.routers.registered()
        await self._report_health()

    async def drain(self, timeout_s: float, *, stop: bool = False) -> tuple[bool, int]:
        """Empty the worker: see `DrainManager.drain`. With `stop` it cannot be undone, and
        `told_to_stop` is done at the end."""
        self._is_stopping |= stop
        self._is_out = True
        await self._report_health()
        drained, moved = await self.drains.drain(timeout_s)
        if not drained and self.intake.is_draining:
            logger.warning(
                "not drained after %g s: %d streams, ledger %s",
                timeout_s,
                self.service.open_streams,
                self.service.ledger(),
            )
        if stop and not self.told_to_stop.done():
            self.told_to_stop.set_result(None)
        return drained, moved

    async def undrain(self) -> None:
        """Take requests again. Raises Unavailable if the worker is to stop."""
        if self._is_stopping:
            raise Unavailable("this worker is stopping")
        await self.drains.end_drain()
        self._is_out = False
        await self._report_health()

    def unready(self) -> str:
        """Return why this worker gets no requests, or an empty text if it does."""
        if self.service.failed.done():
            return "the engine died"
        if self._is_out:
            return "draining"
        return "" if self.routers.is_connected else "no router knows this worker"

    async def _watch_health(self) -> NoReturn:
        while True:
            await self._report_health()
            await self.routers.changed()

    async def _report_health(self) -> None:
        reply = health_pb2.HealthCheckResponse
        for name in ("", _SERVICE):
            status = reply.NOT_SERVING if self.unready() else reply.SERVING
            await self._health.set(name, status)

    async def stop(self, failure: str = "") -> None:
        """Leave the routers, send what is queued for them, and end everything; `failure` is why, if
        the worker was not stopped. Idempotent.

        Drain first for a stop that no client notices.
        """
        await self.routers.stop(failure)
        self.drains.close()
        self.service.close_sessions()
        await self._stack.aclose()

    def state(self) -> WorkerState:
        """Return the state that routers learn with each renewal of the lease."""
        kv = self.service.kv_state()
        return WorkerState(
            load=self.service.load(),
            kv=None if kv is None else kv.report(),
            is_draining=self.intake.is_draining,
            is_moving=self.intake.is_moving,
            unhealthy=self._unhealthy,
            adapters=tuple(self.service.adapters.usable.values()),
            gpus=tuple(self._gpus.latest),
        )

    def set_unhealthy(self, fault: str) -> None:
        """Report a fault of this machine to routers, "" if it is healthy again."""
        self._unhealthy = fault
        self.routers.renew()

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
            group=self._config.data_parallel_group,
            device=engine.device,
            devices=engine.gpus or cores,
            cores=cores,
            gpus=self._config.gpus,
            **texts,
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
