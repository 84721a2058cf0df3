"""The gRPC service of a worker: status, drain and role changes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer
from workers.gpu import gpu_health

if TYPE_CHECKING:
    from pdserve.types import Role, WorkerInfo
    from workers.service import WorkerService

    Context = grpc.aio.ServicerContext[Any, Any]

_MAX_DRAIN_S = 86400.0


class Operations(Protocol):
    """What a worker process can be told to do."""

    @property
    def info(self) -> WorkerInfo: ...

    async def drain(self, timeout_s: float, *, stop: bool = False) -> tuple[bool, int]: ...

    async def undrain(self) -> None: ...

    async def set_role(self, role: Role, drain_timeout_s: float) -> tuple[float, int]: ...

    def settle_role(self, keep: bool) -> bool: ...


class ControlService(WorkerServicer):
    """No state of its own."""

    def __init__(self, service: WorkerService, operations: Operations) -> None:
        self._service = service
        self._operations = operations
        self._started = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: Context
    ) -> w.WorkerStatus:
        load, kv = self._service.load(), self._service.kv_report()
        return w.WorkerStatus(
            info=wire.worker_to_pb(self._operations.info),
            load=None if load is None else wire.load_to_pb(load),
            ledger=wire.ledger_to_pb(self._service.ledger()),
            draining=self._service.is_draining,
            # NVML can be slow on a machine with many GPUs.
            gpus=await asyncio.to_thread(gpu_health),
            open_streams=self._service.open_streams,
            kv=None if kv is None else wire.kv_report_to_pb(kv),
            uptime_s=time.monotonic() - self._started,
        )

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: Context
    ) -> w.DrainResponse:
        try:
            _check_range("timeout_s", request.timeout_s, _MAX_DRAIN_S)
        except PdserveError as error:
            await rpc.abort(context, error)
        drained, moved = await self._operations.drain(request.timeout_s, stop=request.stop)
        ledger = wire.ledger_to_pb(self._service.ledger())
        return w.DrainResponse(drained=drained, ledger=ledger, moved_streams=moved)

    async def Undrain(  # noqa: N802
        self, request: w.UndrainRequest, context: Context
    ) -> w.UndrainResponse:
        try:
            await self._operations.undrain()
        except PdserveError as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.UndrainResponse()

    async def SetRole(  # noqa: N802
        self, request: w.SetRoleRequest, context: Context
    ) -> w.SetRoleResponse:
        try:
            _check_range("drain_timeout_s", request.drain_timeout_s, _MAX_DRAIN_S)
            role = wire.role_from_pb(request.role)
            drain_s, moved = await self._operations.set_role(role, request.drain_timeout_s)
        except PdserveError as error:
            await rpc.abort(context, error)
        return w.SetRoleResponse(drain_s=drain_s, moved_streams=moved)

    async def SettleRole(  # noqa: N802
        self, request: w.SettleRoleRequest, context: Context
    ) -> w.SettleRoleResponse:
        if not self._operations.settle_role(request.keep):
            error = Unavailable("this worker has no role change to settle")
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.SettleRoleResponse()


def _check_range(name: str, value: float, largest: float) -> None:
    if not 0 <= value <= largest:  # NaN too
        raise InvalidRequest(f"{name} must be between 0 and {largest:g}", field=name)
