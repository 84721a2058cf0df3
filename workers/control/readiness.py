"""Readiness of a worker for requests, as reported to routers, health checks and operators."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn

from grpc_health.v1 import health, health_pb2

from pdserve.errors import Unavailable
from pdserve.v1 import worker_pb2 as w
from workers.link.worker_state import WorkerState

if TYPE_CHECKING:
    from workers.control.worker_drain import DrainManager
    from workers.control.worker_intake import WorkerIntake
    from workers.link.registration import Registrations
    from workers.metering.gpu_health import Gpus
    from workers.service import WorkerService

logger = logging.getLogger(__name__)

SERVICE = w.DESCRIPTOR.services_by_name["Worker"].full_name


class Readiness:
    """Drains a worker for operators, and reports its readiness. `stop_requested` completes when an
    operator has drained the worker to end its process. `health` is the gRPC health service.
    """

    def __init__(
        self,
        intake: WorkerIntake,
        service: WorkerService,
        routers: Registrations,
        drains: DrainManager,
        gpus: Gpus,
    ) -> None:
        self.stop_requested: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.health = health.aio.HealthServicer()
        self._intake, self._service = intake, service
        self._routers, self._drains, self._gpus = routers, drains, gpus
        self._is_stopping = False
        self._is_out = intake.is_drained  # drained by an operator, by a signal, or from the start
        self._unhealthy = ""  # the fault of the machine

    async def drain(self, timeout_s: float, *, stop: bool = False) -> tuple[bool, int]:
        """Empty the worker: see `DrainManager.drain`. With `stop` it cannot be undone, and
        `stop_requested` completes at the end."""
        self._is_stopping |= stop
        self._is_out = True
        await self.report()
        drained, moved = await self._drains.drain(timeout_s)
        if not drained and self._intake.is_draining:
            logger.warning(
                "not drained after %g s: %d streams, ledger %s",
                timeout_s,
                self._service.open_streams,
                self._service.ledger(),
            )
        if stop and not self.stop_requested.done():
            self.stop_requested.set_result(None)
        return drained, moved

    async def undrain(self) -> None:
        """Accept requests again. Raises Unavailable if the worker is stopping."""
        if self._is_stopping:
            raise Unavailable("this worker is stopping")
        await self._drains.end_drain()
        self._is_out = False
        await self.report()

    def why_unready(self) -> str:
        """Return why this worker gets no requests, or ""."""
        if self._service.failed.done():
            return "the engine died"
        if self._is_out:
            return "draining"
        return "" if self._routers.is_connected else "no router knows this worker"

    async def report(self) -> None:
        """Update the gRPC health service."""
        reply = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            status = reply.NOT_SERVING if self.why_unready() else reply.SERVING
            await self.health.set(name, status)

    async def watch(self) -> NoReturn:
        """Update the gRPC health service when routers register or forget this worker."""
        while True:
            await self.report()
            await self._routers.changed()

    def set_unhealthy(self, fault: str) -> None:
        """Report a fault of this machine to routers, or "" once it is healthy again."""
        self._unhealthy = fault
        self._routers.renew()

    def state(self) -> WorkerState:
        """Return the state that each renewal of the lease reports to routers."""
        kv = self._service.kv_state()
        return WorkerState(
            load=self._service.load(),
            kv=None if kv is None else kv.report(),
            is_draining=self._intake.is_draining,
            is_moving=self._intake.is_moving,
            unhealthy=self._unhealthy,
            adapters=tuple(self._service.adapters.usable.values()),
            gpus=tuple(self._gpus.latest),
            weights=self._intake.weights,
            updating=self._intake.updating,
        )
