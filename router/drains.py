"""Takes workers out of service and back, for people: asks the worker, and watches it empty.

The worker itself tells every router that it drains, and asks them to move what does not end in time
(`Coordinator.move_off`), so that it does not matter which router was asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import rpc
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.member import MemberState
from router.placement.pairing import check_servable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from router.fleet import Fleet
    from router.member import Member
    from router.pool import WorkerPool

logger = logging.getLogger(__name__)

# Beyond the time that streams may take to end: to move the others, and to free their blocks.
REST_S = 60.0
RPC_S = 5.0
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a drain is; the last one is `done`, and `drained` where nothing was left."""

    open_streams: int = 0
    pinned_blocks: int = 0
    seconds: float = 0.0
    done: bool = False
    drained: bool = False
    moved_streams: int = 0


def member_to_drain(pool: WorkerPool, worker_id: str, *, force: bool) -> Member:
    """Raises InvalidRequest for a worker that is not there, and without `force` Unavailable where
    its model is served now and could not be served without it."""
    member = pool.members.get(worker_id)
    if member is None or member.lost:
        raise InvalidRequest(f"no worker {worker_id} is registered", field="worker_id")
    if force or member.state is not MemberState.READY:
        return member
    model = member.info.model.name
    candidates = pool.candidates(model)
    check_servable(candidates, model)
    try:
        check_servable([c for c in candidates if c.worker_id != worker_id], model)
    except Unavailable as error:
        raise Unavailable(f"without worker {worker_id}: {error.message}") from error
    return member


class Drains:
    """Uses a fleet; no state of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def drain(
        self, worker_id: str, *, timeout_s: float, force: bool, stop: bool
    ) -> AsyncGenerator[Progress, None]:
        """Drains a worker, telling how far it is. Whoever leaves earlier leaves it draining.

        Raises as `member_to_drain`, and what the worker raises.
        """
        member = member_to_drain(self._fleet.pool, worker_id, force=force)
        began, dialer = time.monotonic(), self._fleet.dialer
        async with dialer.open_channel(member.info.address) as channel:
            stub, metadata = WorkerStub(channel), dialer.metadata
            request = w.DrainRequest(timeout_s=timeout_s, stop=stop)
            call = stub.Drain(request, timeout=timeout_s + REST_S, metadata=metadata)
            asking = asyncio.ensure_future(_reply(call))
            try:
                while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:
                    status = await stub.GetStatus(
                        w.GetStatusRequest(), timeout=RPC_S, metadata=metadata
                    )
                    progress = _progress(status, time.monotonic() - began)
                    yield progress
                    if progress.done:
                        return
                reply = asking.result()
            except grpc.aio.AioRpcError as error:
                raise rpc.error_from_rpc(error) from error
            finally:
                call.cancel()
                asking.cancel()
                await asyncio.wait({asking})
        logger.info("worker %s: %s", worker_id, "drained" if reply.drained else "not drained")
        yield Progress(
            open_streams=reply.ledger.engine_requests,
            pinned_blocks=_pinned(reply.ledger),
            seconds=time.monotonic() - began,
            done=True,
            drained=reply.drained,
            moved_streams=reply.moved_streams,
        )

    async def undrain(self, worker_id: str) -> None:
        """Gives a worker work again. Raises InvalidRequest and what the worker raises."""
        member = member_to_drain(self._fleet.pool, worker_id, force=True)
        dialer = self._fleet.dialer
        async with dialer.open_channel(member.info.address) as channel:
            try:
                await WorkerStub(channel).Undrain(
                    w.UndrainRequest(), timeout=RPC_S, metadata=dialer.metadata
                )
            except grpc.aio.AioRpcError as error:
                raise rpc.error_from_rpc(error) from error


async def _reply(call: grpc.aio.UnaryUnaryCall[w.DrainRequest, w.DrainResponse]) -> w.DrainResponse:
    return await call


def _progress(status: w.WorkerStatus, seconds: float) -> Progress:
    """Done where somebody has given the worker work again meanwhile."""
    return Progress(status.open_streams, _pinned(status.ledger), seconds, done=not status.draining)


def _pinned(ledger: w.KvLedger) -> int:
    return ledger.in_flight_blocks + ledger.leased_blocks
