"""The gRPC service that controls a worker."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.model.tokenizer import read_files
from pdserve.net import rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer
from workers.control.loaded_adapters import directory_within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from workers.control.readiness import Readiness
    from workers.control.weights_update import WeightsUpdater
    from workers.control.worker_drain import DrainManager
    from workers.link.registration import Registrations
    from workers.service import WorkerService

    Context = grpc.aio.ServicerContext[Any, Any]


class ControlServicer(WorkerServicer):
    """Executes the RPCs of routers and operators."""

    def __init__(
        self,
        routers: Registrations,
        service: WorkerService,
        readiness: Readiness,
        drains: DrainManager,
        weights: WeightsUpdater,
        *,
        adapter_directories: Sequence[str],
    ) -> None:
        self._routers = routers
        self._service = service
        self._readiness = readiness
        self._drains = drains
        self._weights = weights
        self._allowed = adapter_directories
        self._began = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: Context
    ) -> w.WorkerStatus:
        state = self._readiness.state()
        return w.WorkerStatus(
            info=wire.worker_to_pb(self._routers.info),
            load=None if state.load is None else wire.load_to_pb(state.load),
            ledger=wire.ledger_to_pb(self._service.ledger()),
            draining=state.is_draining,
            gpus=state.gpus,
            open_streams=self._service.open_streams,
            kv=None if state.kv is None else wire.kv_report_to_pb(state.kv),
            uptime_s=time.monotonic() - self._began,
        )

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: Context
    ) -> w.DrainResponse:
        async with _refusing(context):
            wire.check_drain_timeout(request.timeout_s, field="timeout_s")
        drained, moved = await self._readiness.drain(request.timeout_s, stop=request.stop)
        ledger = wire.ledger_to_pb(self._service.ledger())
        return w.DrainResponse(drained=drained, ledger=ledger, moved_streams=moved)

    async def Undrain(  # noqa: N802
        self, request: w.UndrainRequest, context: Context
    ) -> w.UndrainResponse:
        async with _refusing(context, grpc.StatusCode.FAILED_PRECONDITION):
            await self._readiness.undrain()
        return w.UndrainResponse()

    async def SetRole(  # noqa: N802
        self, request: w.SetRoleRequest, context: Context
    ) -> w.SetRoleResponse:
        async with _refusing(context):
            wire.check_drain_timeout(request.drain_timeout_s, field="drain_timeout_s")
            role, began = wire.role_from_pb(request.role), time.monotonic()
            moved = await self._drains.change_role(role, request.drain_timeout_s)
        return w.SetRoleResponse(drain_s=time.monotonic() - began, moved_streams=moved)

    async def SettleRole(  # noqa: N802
        self, request: w.SettleRoleRequest, context: Context
    ) -> w.SettleRoleResponse:
        async with _refusing(context, grpc.StatusCode.FAILED_PRECONDITION):
            if not self._drains.settle_role(keep=request.keep):
                raise Unavailable("this worker has no role change to settle")
        return w.SettleRoleResponse()

    async def LoadAdapter(  # noqa: N802
        self, request: w.LoadAdapterRequest, context: Context
    ) -> w.Adapter:
        async with _refusing(context):
            path = await asyncio.to_thread(directory_within, self._allowed, request.path)
            adapter = await self._service.adapters.load(
                request.name, path, self._routers.info.model.name, request.digest
            )
        return wire.adapter_to_pb(adapter)

    async def UpdateWeights(  # noqa: N802
        self, request: w.UpdateWeightsRequest, context: Context
    ) -> w.UpdateWeightsResponse:
        updater, ended = self._weights, 0
        change = request.transaction, request.owner, request.hold_s
        async with _refusing(context):
            wire.check_drain_timeout(request.hold_s, field="hold_s")
            wire.check_drain_timeout(request.timeout_s, field="timeout_s")
            if not request.transaction:
                raise InvalidRequest("transaction is missing", field="transaction")
        async with _refusing(context, grpc.StatusCode.FAILED_PRECONDITION):
            match request.stage:
                case w.WEIGHTS_STAGE_PREPARE:
                    wanted = wire.weights_from_pb(request.weights)
                    weights = await updater.prepare(*change, wanted)
                case w.WEIGHTS_STAGE_QUIESCE:
                    mode = wire.quiesce_mode(request.mode)
                    ended = await updater.quiesce(*change, mode, request.timeout_s)
                    weights = updater.weights
                case w.WEIGHTS_STAGE_COMMIT:
                    weights = await updater.commit(request.transaction, request.hold_s)
                case w.WEIGHTS_STAGE_RESUME:
                    weights = await updater.resume(request.transaction)
                case w.WEIGHTS_STAGE_HOLD:
                    weights = updater.hold(request.transaction, request.hold_s)
                case _:
                    raise InvalidRequest("stage is missing", field="stage")
        return w.UpdateWeightsResponse(weights=wire.weights_to_pb(weights), ended_streams=ended)

    async def GetTokenizer(  # noqa: N802
        self, request: w.GetTokenizerRequest, context: Context
    ) -> w.TokenizerFiles:
        async with _refusing(context):
            files = await asyncio.to_thread(read_files, Path(self._routers.info.model.path))
        return w.TokenizerFiles(files=files)

    async def Render(  # noqa: N802
        self, request: w.RenderRequest, context: Context
    ) -> w.RenderResponse:
        async with _refusing(context):
            return await self._service.render(request)

    async def UnloadAdapter(  # noqa: N802
        self, request: w.UnloadAdapterRequest, context: Context
    ) -> w.UnloadAdapterResponse:
        async with _refusing(context):
            await self._service.adapters.unload(request.adapter)
        return w.UnloadAdapterResponse()


@asynccontextmanager
async def _refusing(context: Context, status: grpc.StatusCode | None = None) -> AsyncIterator[None]:
    """End the RPC with an error that the block raises."""
    try:
        yield
    except PdserveError as error:
        await rpc.abort(context, error, status=status)
