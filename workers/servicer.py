"""The gRPC face of a worker; what it does is in workers/worker.py."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc

from pdserve import rpc, wire
from pdserve.errors import InternalError, InvalidRequest, PdserveError, Unavailable
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer
from workers.gpu_health import gpu_health

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence

    from workers.frame_port import FrameCarrier
    from workers.server import WorkerServer
    from workers.session import Session

    Context = grpc.aio.ServicerContext[Any, Any]
    Commands = AsyncIterable[w.Command]
    Write = Callable[[w.StepFrame], Awaitable[None]]

logger = logging.getLogger(__name__)

_HELLO_S = 10.0
# A router that has heard nothing for several of these knows that something hangs.
BEAT_S = 0.5
# A large batch is taken in slices of this, or signs of life would wait behind it.
_TAKE_S = 0.01
_MAX_DRAIN_S = 86400.0
_MAX_INTERVAL_S = 60.0


class WorkerService(WorkerServicer):
    """No state of its own."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server
        self._worker = server.worker
        self._started = time.monotonic()

    async def Attach(  # type: ignore[override]  # noqa: N802 - written to, not iterated
        self, request_iterator: AsyncIterator[w.Command], context: Context
    ) -> None:
        """One router's stream. Its end, however it comes, cancels all that came over it."""
        commands = aiter(request_iterator)
        session, carrier = await self._greet(commands, context)
        try:
            # Answers the Hello before there is any frame.
            await context.send_initial_metadata(() if carrier is None else carrier.offer.metadata)
            sources: list[Commands] = [commands]
            write: Write = context.write
            if carrier is not None:
                sources, write = [commands, carrier], carrier.write
            error = await self._exchange(session, sources, write)
        finally:
            self._worker.detach(session)
            if carrier is not None:
                carrier.close()
        if error is not None:
            await rpc.abort(context, error)

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: Context
    ) -> w.WorkerStatus:
        load, kv = self._worker.load(), self._worker.kv_report()
        return w.WorkerStatus(
            info=wire.worker_to_pb(self._server.info),
            load=None if load is None else wire.load_to_pb(load),
            ledger=wire.ledger_to_pb(self._worker.ledger()),
            draining=self._worker.is_draining,
            # NVML can take its time on a machine with many GPUs.
            gpus=await asyncio.to_thread(gpu_health),
            open_streams=self._worker.open_streams,
            kv=None if kv is None else wire.kv_report_to_pb(kv),
            uptime_s=time.monotonic() - self._started,
        )

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: Context
    ) -> w.DrainResponse:
        if not 0 <= request.timeout_s <= _MAX_DRAIN_S:
            error = InvalidRequest(
                f"timeout_s must be between 0 and {_MAX_DRAIN_S:g}", field="timeout_s"
            )
            await rpc.abort(context, error)
        drained, moved = await self._server.drain(request.timeout_s, stop=request.stop)
        return w.DrainResponse(
            drained=drained,
            ledger=wire.ledger_to_pb(self._worker.ledger()),
            moved_streams=moved,
        )

    async def Undrain(  # noqa: N802
        self, request: w.UndrainRequest, context: Context
    ) -> w.UndrainResponse:
        try:
            await self._server.undrain()
        except PdserveError as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.UndrainResponse()

    async def WatchCache(  # noqa: N802
        self, request: w.WatchCacheRequest, context: Context
    ) -> AsyncIterator[w.CacheUpdate]:
        """One router's watch of the prefix cache, until either side leaves."""
        if not request.router_id:
            await rpc.abort(context, InvalidRequest("router_id is missing", field="router_id"))
        if not 0 <= request.min_interval_s <= _MAX_INTERVAL_S:
            error = InvalidRequest(
                f"min_interval_s must be between 0 and {_MAX_INTERVAL_S:g}", field="min_interval_s"
            )
            await rpc.abort(context, error)
        await self._check_instance_id(request.instance_id, "instance_id", context)
        try:
            watcher = self._worker.watch_cache(request.router_id)
        except PdserveError as error:
            await rpc.abort(context, error)
        try:
            while True:
                yield await watcher.next_update()
                await asyncio.sleep(request.min_interval_s)
        except PdserveError as error:
            await rpc.abort(context, error)
        finally:
            self._worker.cache.leave(watcher)

    async def _check_instance_id(self, instance_id: str, field: str, context: Context) -> None:
        if instance_id != self._server.instance_id:
            stale = InvalidRequest(
                f"this worker's instance id is {self._server.instance_id}", field=field
            )
            await rpc.abort(context, stale, status=grpc.StatusCode.FAILED_PRECONDITION)

    async def SetRole(  # noqa: N802
        self, request: w.SetRoleRequest, context: Context
    ) -> w.SetRoleResponse:
        try:
            if not 0 <= request.drain_timeout_s <= _MAX_DRAIN_S:
                raise InvalidRequest(
                    f"drain_timeout_s must be between 0 and {_MAX_DRAIN_S:g}",
                    field="drain_timeout_s",
                )
            role = wire.role_from_pb(request.role)
            drain_s, moved = await self._server.set_role(role, request.drain_timeout_s)
        except PdserveError as error:
            await rpc.abort(context, error)
        return w.SetRoleResponse(drain_s=drain_s, moved_streams=moved)

    async def SettleRole(  # noqa: N802
        self, request: w.SettleRoleRequest, context: Context
    ) -> w.SettleRoleResponse:
        if not self._server.settle_role(request.keep):
            error = Unavailable("this worker has no role to settle")
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.SettleRoleResponse()

    async def _greet(
        self, commands: AsyncIterator[w.Command], context: Context
    ) -> tuple[Session, FrameCarrier | None]:
        try:
            async with asyncio.timeout(_HELLO_S):
                command = await anext(commands)
            if command.WhichOneof("command") != "hello" or not command.hello.router_id:
                raise InvalidRequest("the first command must be hello with a router_id")
        except (StopAsyncIteration, TimeoutError):
            await rpc.abort(context, InvalidRequest("no hello came", field="hello"))
        except InvalidRequest as error:
            await rpc.abort(context, error)
        await self._check_instance_id(command.hello.instance_id, "hello.instance_id", context)
        try:
            session = self._worker.attach(command.hello.router_id)
        except PdserveError as error:
            await rpc.abort(context, error)
        if self._server.frames is None or not command.hello.takes_frames_apart:
            return session, None
        carrier = self._server.frames.expect()
        gone = Unavailable("the connection for this router's frames is closed")
        carrier.closed.add_done_callback(lambda _: session.cut(gone))
        return session, carrier

    async def _exchange(
        self, session: Session, sources: Sequence[Commands], write: Write
    ) -> PdserveError | None:
        """Both directions until one of them ends; what the router is to be told, if anything."""
        readers = [
            asyncio.create_task(self._read(session, source), name="attach-read")
            for source in sources
        ]
        writer = asyncio.create_task(self._write(session, write), name="attach-write")
        tasks = [*readers, writer]
        ends: set[asyncio.Future[Any]] = {*tasks, session.cut_by}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return _error_of(session, *tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: Session, commands: Commands) -> None:
        """Takes commands in order until the router ends the stream. Raises InvalidRequest for one
        that belongs to no request: then the two do not speak the same language."""
        began = time.monotonic()
        async for command in commands:
            is_batch = command.WhichOneof("command") == "batch"
            for one in command.batch.commands if is_batch else (command,):
                self._take(session, one)
                if time.monotonic() - began >= _TAKE_S:
                    await asyncio.sleep(0)
                    began = time.monotonic()

    def _take(self, session: Session, command: w.Command) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(session, command.submit)
            case "cancel":
                self._worker.cancel(session, command.cancel.stream_id)
            case "export":
                self._worker.export(session, command.export)
            case other:
                name = other or "nothing"
                raise InvalidRequest(f"{name} is no command after hello", field="command")

    async def _write(self, session: Session, write: Write) -> None:
        """Frames as they come; where none do, a sign of life while requests are open, and the load
        when it has changed."""
        while True:
            try:
                frame = await session.next_frame(BEAT_S)
            except TimeoutError:
                if beat := self._worker.beat(session):
                    await write(beat)
                continue
            if frame is None:
                return
            await write(frame)

    def _submit(self, session: Session, submit: w.Submit) -> None:
        try:
            self._worker.submit(session, submit)
        except Exception:
            logger.exception("submit of request %s failed", submit.request_id)
            error = InternalError("the worker could not take the request")
            for stream_id in (submit.stream_id, *(fork.stream_id for fork in submit.forks)):
                self._worker.refuse(session, stream_id, error)


def _error_of(session: Session, *tasks: asyncio.Task[None]) -> PdserveError | None:
    """Why the stream ended, where the router is to be told."""
    if session.cut_by.done():
        return session.cut_by.result()
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, PdserveError):
            return error
        if error is not None:
            logger.error("the stream of router %s broke", session.router_id, exc_info=error)
            return InternalError("the worker could not serve the stream")
    return None
