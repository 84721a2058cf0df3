"""One worker: its engine, its gRPC server and its registrations, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve import rpc
from pdserve.access.guard import Party, guards
from pdserve.access.tls import dialer, server_credentials
from pdserve.capability import CapabilityKey
from pdserve.errors import ConfigError, Unavailable
from pdserve.tracing import open_tracing
from pdserve.types import Role, WorkerInfo
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from pdserve.web_server import WebServer, bind
from workers.debug import DebugApp
from workers.engines import make_engine
from workers.frame_port import FramePort
from workers.gpu_watch import GpuWatch
from workers.registration import Registrations
from workers.servicer import WorkerService
from workers.worker import MAX_FRAMES, Worker

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from pdserve.config import WorkerConfig
    from workers.engine import Engine, EngineInfo

logger = logging.getLogger(__name__)

GRPC_STOP_S = 2.0
# A role that nobody settles in this time is given up: whoever wanted it is gone.
SETTLE_S = 60.0
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerServer:
    """Owns everything of a worker. `start` once, then `stop`; all in one event loop.

    The instance id, minted here, tells one life of a worker from the next. `kv_key`, minted here
    too, is what its routers make capabilities with; it is None where KV cannot leave. `engine` and
    `instance_id` are for tests; without them the configuration says which.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        engine: Engine | None = None,
        instance_id: str | None = None,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        self.instance_id = instance_id or uuid.uuid4().hex
        is_ours = config.role is not Role.AGGREGATED and config.kv.connector == "pdserve"
        self.kv_key = CapabilityKey.generate() if is_ours else None
        self.worker_id = config.worker_id or f"{config.role}-{os.getpid()}-{self.instance_id[:6]}"
        engine = engine or make_engine(
            config, self.instance_id, worker_id=self.worker_id, kv_key=self.kv_key
        )
        self.worker = Worker(engine, config.role, max_frames=max_frames)
        self.info: WorkerInfo
        self.frames: FramePort | None = None
        self._config = config
        self._stack = AsyncExitStack()
        self._health = health.aio.HealthServicer()
        self._registrations: Registrations | None = None
        self._unsettled: asyncio.TimerHandle | None = None
        self._is_stopping = False
        # Done when somebody asked over the network that the process end.
        self.told_to_stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> WorkerInfo:
        """Loads the model, serves, and begins to register; nothing is left behind when it raises.

        Raises ConfigError for an address that cannot be had, and what the engine's start raises.
        """
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> WorkerInfo:
        access = self._config.access
        dials, credentials = dialer(access), server_credentials(access.tls)
        tracing = open_tracing(
            self._config.otlp_endpoint, service="pdserve-worker", instance=self.worker_id
        )
        if tracing is not None:
            self.worker.tracing = tracing
            self._stack.push_async_callback(asyncio.to_thread, tracing.close)
        self._stack.push_async_callback(self.worker.close)
        engine = await self.worker.start()
        server = rpc.make_server(guards(access, shared_with=Party.ROUTER))
        host, port = self._config.host, self._config.port
        try:
            port = rpc.listen(server, _join(host, port), credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host} port {port}", field="port") from error
        if credentials is None:
            self.frames = FramePort(host)
            # Behind the gRPC server's end: what is queued for routers goes out before.
            self._stack.callback(self.frames.stop)
            await self.frames.start()
        debug = self._bind_debug()
        self.info = self._describe(engine, _join(host, port), _address_of(debug))
        add_WorkerServicer_to_server(WorkerService(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await server.start()
        self._stack.push_async_callback(server.stop, GRPC_STOP_S)
        await self._say_serving(True)
        if debug is not None:
            web = WebServer(DebugApp(self.worker, lambda: self.info), debug)
            self._stack.push_async_callback(web.stop)
            await web.start()
        self._registrations = Registrations(
            self._config.routers, self.info, self.worker, kv_key=self.kv_key, dialer=dials
        )
        self._stack.push_async_callback(self._registrations.stop)
        self.worker.on_change = self._registrations.nudge
        self.worker.tell_routers = self._registrations.told
        self._registrations.start()
        watch = GpuWatch(self.worker, self._config.gpu, self._registrations.nudge)
        self._stack.push_async_callback(watch.stop)
        watch.start()
        return self.info

    async def registered(self) -> None:
        """Waits until every router knows this worker."""
        assert self._registrations is not None
        await self._registrations.registered()

    @property
    def failed(self) -> asyncio.Future[BaseException]:
        """Gets the error of an engine that died."""
        return self.worker.failed

    @property
    def refused(self) -> asyncio.Future[BaseException]:
        """Gets the error of a router that will not have this worker."""
        assert self._registrations is not None
        return self._registrations.refused

    async def drain(self, timeout_s: float, *, stop: bool = False) -> tuple[bool, int]:
        """Takes no new work, tells the routers so, and waits for what is open; what does not end in
        time goes on elsewhere: (whether nothing is left, how many streams that were). With `stop`
        there is no way back, and `told_to_stop` is done at the end."""
        self._is_stopping |= stop
        await self._say_serving(False)
        drained, moved = await self.worker.drain(timeout_s)
        if not drained:
            logger.warning(
                "not drained after %g s: %d streams, ledger %s",
                timeout_s,
                self.worker.open_streams,
                self.worker.ledger(),
            )
        if stop and not self.told_to_stop.done():
            self.told_to_stop.set_result(None)
        return drained, moved

    async def undrain(self) -> None:
        """Takes work again. Raises Unavailable where the worker is to stop."""
        if self._is_stopping:
            raise Unavailable("this worker is stopping")
        self.worker.end_drain()
        await self._say_serving(True)
        self._nudge()

    async def _say_serving(self, is_serving: bool) -> None:
        reply = health_pb2.HealthCheckResponse
        for name in ("", _SERVICE):
            await self._health.set(name, reply.SERVING if is_serving else reply.NOT_SERVING)

    async def set_role(self, role: Role, drain_timeout_s: float) -> tuple[float, int]:
        """Ends all work and registers in another role, which is to be settled; how long that took
        and how many streams went on elsewhere. Raises InvalidRequest and Unavailable."""
        began = time.monotonic()
        try:
            moved = await self.worker.change_role(role, drain_timeout_s)
        except BaseException:
            self._nudge()
            raise
        self._announce()
        loop = asyncio.get_running_loop()
        self._unsettled = loop.call_later(SETTLE_S, self.settle_role, False)
        return time.monotonic() - began, moved

    def settle_role(self, keep: bool) -> bool:
        """Takes work again, in the new role, or in the former where it is not to be kept. False
        where there was nothing to settle."""
        if self._unsettled is not None:
            self._unsettled.cancel()
            self._unsettled = None
        if not self.worker.roles.settle(keep=keep):
            return False
        if keep:
            logger.info("worker %s is a %s worker now", self.worker_id, self.worker.role)
            self._nudge()
        else:
            logger.warning("worker %s stays a %s worker", self.worker_id, self.worker.role)
            self._announce()
        return True

    def _announce(self) -> None:
        self.info = replace(self.info, role=self.worker.role)
        if self._registrations is not None:
            self._registrations.announce(self.info)

    def _nudge(self) -> None:
        if self._registrations is not None:
            self._registrations.nudge()

    async def stop(self) -> None:
        """Leaves the routers, lets what is queued for them go out, and ends all else. Idempotent.

        Drain first, for a stop that nobody notices.
        """
        if self._unsettled is not None:
            self._unsettled.cancel()
        if self._registrations is not None:
            await self._registrations.stop()
        self.worker.close_sessions()
        await self._stack.aclose()

    def _bind_debug(self) -> socket.socket | None:
        host = self._config.debug_host
        return bind(host, self._config.debug_port, key="debug_port") if host else None

    def _describe(self, engine: EngineInfo, address: str, debug_address: str) -> WorkerInfo:
        role = self.worker.role
        return WorkerInfo(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            role=role,
            model=engine.model,
            address=address,
            kv=engine.kv,
            block_size=engine.block_size,
            total_blocks=engine.total_blocks,
            max_num_seqs=engine.max_num_seqs,
            pid=os.getpid(),
            engine=engine.name,
            settings={**_share_of_machine(self._config.gpus), **engine.settings},
            debug_address=debug_address,
        )


def _share_of_machine(gpus: Sequence[int]) -> dict[str, str]:
    """GPUs only where some are the worker's own."""
    named = {"gpus": ",".join(map(str, gpus))} if gpus else {}
    return {"cores": str(len(os.sched_getaffinity(0))), **named}


def _address_of(sock: socket.socket | None) -> str:
    return "" if sock is None else _join(*sock.getsockname()[:2])


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
