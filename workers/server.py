"""A worker: its engine, its listeners and its registrations, started and stopped in order, and the
gRPC service that controls it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve import rpc, wire
from pdserve.errors import ConfigError, InvalidRequest, PdserveError, Unavailable
from pdserve.http_server import HttpServer, bind
from pdserve.security.roles import Party, make_guard
from pdserve.security.tls import dialer, server_context, server_credentials
from pdserve.telemetry import open_tracing
from pdserve.tokenizer import read_files
from pdserve.types import WorkerInfo
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from workers.debug import debug_handler
from workers.energy import Unmeasured, meter, nvml_counter, rapl_counter
from workers.engines import make_engine
from workers.gpu import Gpus
from workers.registration import Registrations
from workers.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import WorkerConfig
    from workers.energy import Counter
    from workers.engine import Engine, EngineInfo

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

GRPC_STOP_S = 2.0
_MAX_DRAIN_S = 86400.0
_SERVICE = w.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServer(WorkerServicer):
    """Owns everything of a worker. Call `start` once, then `stop`, in one event loop.

    `instance_id` changes at every start. Tests give `engine` and `instance_id`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        engine: Engine | None = None,
        instance_id: str | None = None,
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
        self._began = time.monotonic()
        self._guard = make_guard(config.access, shared_with=Party.ROUTER)
        self.routers = Registrations(config.routers, dialer=dialer(config.access))
        self._tracing = open_tracing(
            config.otlp_endpoint, service="pdserve-worker", instance=self.worker_id
        )
        self.service = WorkerService(
            engine or make_engine(config, self.instance_id),
            config.role,
            self.instance_id,
            routers=self.routers,
            guard=self._guard,
            tracing=self._tracing,
            draining=config.warm,
        )

    @property
    def info(self) -> WorkerInfo:
        """What routers are told of this worker. Only once it has started."""
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
                await self.service.load_adapter(name, path, engine.model.name)
            except PdserveError as error:
                raise ConfigError(
                    f"adapters.{name}: {error.message}", field=f"adapters.{name}"
                ) from error
        session_address = await self._listen_for_sessions()
        server = rpc.make_server(self._guard)
        credentials = server_credentials(config.access.tls)
        try:
            port = rpc.listen(server, _join(config.host, config.port), credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {config.host} port {config.port}", field="port"
            ) from error
        debug = None
        if config.debug_host:
            debug = bind(config.debug_host, config.debug_port, key="debug_port")
        gpus = 0
        if engine.settings.get("device", "cpu") != "cpu":
            gpus = int(engine.settings.get("tensor_parallel_size", 1))
        counter, energy = self._open_counter(gpus)
        info = self._describe(
            engine,
            gpus,
            energy=energy,
            address=_join(config.host, port),
            session_address=session_address,
            debug_address=_join(*debug.getsockname()[:2]) if debug else "",
        )
        add_WorkerServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await server.start()
        stack.push_async_callback(server.stop, GRPC_STOP_S)
        if debug is not None:
            pages = debug_handler(self.service, lambda: self.info, self._gpus, self.unready)
            web = HttpServer(pages, debug)
            stack.push_async_callback(web.stop)
            await web.start()
        self.routers.start(info, self._renewal, self.service.account)
        stack.push_async_callback(self.routers.stop)
        watches = [
            ("gpu-watch", self._gpus.watch(gpus, self.service.set_unhealthy)),
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
        return _join(*server.sockets[0].getsockname()[:2])

    async def registered(self) -> None:
        """Wait until every router that is listed knows this worker."""
        await self.routers.registered()
        await self._report_health()

    async def drain(self, timeout_s: float, *, stop: bool = False) -> tuple[bool, int]:
        """Empty the worker: see `WorkerService.drain`. With `stop` it cannot be undone, and
        `told_to_stop` is done at the end."""
        self._is_stopping |= stop
        self._is_out = True
        await self._report_health()
        drained, moved = await self.service.drain(timeout_s)
        if not drained and self.service.is_draining:
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
        await self.service.end_drain()
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

    async def stop(self) -> None:
        """Leave the routers, send what is queued for them, and end everything. Idempotent.

        Drain first for a stop that no client notices.
        """
        await self.routers.stop()
        self.service.close_sessions()
        await self._stack.aclose()

    def _renewal(self) -> w.RenewRequest:
        renewal = self.service.state()
        renewal.gpus.extend(self._gpus.latest)
        return renewal

    def _describe(self, engine: EngineInfo, gpus: int, **texts: str) -> WorkerInfo:
        """Return what routers are told of a worker that computes on so many GPUs, 0 for CPUs."""
        cores = len(os.sched_getaffinity(0))
        machine = {"cores": str(cores)}
        if self._config.gpus:
            machine["gpus"] = ",".join(map(str, self._config.gpus))
        return WorkerInfo(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            role=self.service.role,
            model=engine.model,
            kv=engine.kv,
            block_size=engine.block_size,
            total_blocks=engine.total_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_loras=engine.max_loras,
            unsupported_fields=engine.unsupported_fields,
            pid=os.getpid(),
            engine=engine.name,
            settings={**machine, **engine.settings},
            topology=self._config.topology.labels,
            revision=self._config.revision,
            device=engine.settings["device_name"] if gpus else "cpu",
            devices=gpus or cores,
            **texts,
        )

    # The gRPC service.

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: Context
    ) -> w.WorkerStatus:
        state = self.service.state()
        return w.WorkerStatus(
            info=wire.worker_to_pb(self.info),
            load=state.load if state.HasField("load") else None,
            ledger=wire.ledger_to_pb(self.service.ledger()),
            draining=state.draining,
            # NVML can be slow on a machine with many GPUs.
            gpus=self._gpus.latest,
            open_streams=self.service.open_streams,
            kv=state.kv if state.HasField("kv") else None,
            uptime_s=time.monotonic() - self._began,
        )

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: Context
    ) -> w.DrainResponse:
        async with _refusing(context):
            _check_range("timeout_s", request.timeout_s)
        drained, moved = await self.drain(request.timeout_s, stop=request.stop)
        ledger = wire.ledger_to_pb(self.service.ledger())
        return w.DrainResponse(drained=drained, ledger=ledger, moved_streams=moved)

    async def Undrain(  # noqa: N802
        self, request: w.UndrainRequest, context: Context
    ) -> w.UndrainResponse:
        async with _refusing(context, grpc.StatusCode.FAILED_PRECONDITION):
            await self.undrain()
        return w.UndrainResponse()

    async def SetRole(  # noqa: N802
        self, request: w.SetRoleRequest, context: Context
    ) -> w.SetRoleResponse:
        async with _refusing(context):
            _check_range("drain_timeout_s", request.drain_timeout_s)
            role, began = wire.role_from_pb(request.role), time.monotonic()
            moved = await self.service.change_role(role, request.drain_timeout_s)
        return w.SetRoleResponse(drain_s=time.monotonic() - began, moved_streams=moved)

    async def SettleRole(  # noqa: N802
        self, request: w.SettleRoleRequest, context: Context
    ) -> w.SettleRoleResponse:
        async with _refusing(context, grpc.StatusCode.FAILED_PRECONDITION):
            if not self.service.settle_role(keep=request.keep):
                raise Unavailable("this worker has no role change to settle")
        return w.SettleRoleResponse()

    async def LoadAdapter(  # noqa: N802
        self, request: w.LoadAdapterRequest, context: Context
    ) -> w.Adapter:
        async with _refusing(context):
            adapter = await self.service.load_adapter(
                request.name, request.path, self.info.model.name, request.digest
            )
        return wire.adapter_to_pb(adapter)

    async def GetTokenizer(  # noqa: N802
        self, request: w.GetTokenizerRequest, context: Context
    ) -> w.TokenizerFiles:
        async with _refusing(context):
            files = await asyncio.to_thread(read_files, Path(self.info.model.path))
        return w.TokenizerFiles(files=files)

    async def UnloadAdapter(  # noqa: N802
        self, request: w.UnloadAdapterRequest, context: Context
    ) -> w.UnloadAdapterResponse:
        async with _refusing(context):
            await self.service.unload_adapter(request.adapter)
        return w.UnloadAdapterResponse()


@asynccontextmanager
async def _refusing(context: Context, status: grpc.StatusCode | None = None) -> AsyncIterator[None]:
    """End the RPC with the error that is raised inside."""
    try:
        yield
    except PdserveError as error:
        await rpc.abort(context, error, status=status)


def _check_range(name: str, seconds: float) -> None:
    if not 0 <= seconds <= _MAX_DRAIN_S:  # NaN too
        raise InvalidRequest(f"{name} must be between 0 and {_MAX_DRAIN_S:g}", field=name)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
