"""Takes workers out of service and back: asks the worker, and watches it become empty.

The worker tells every router that it drains and when to move its requests, so any router can be
asked to drain it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import rpc
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.placement.filters import check_servable
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from router.fleet.member import Member
    from router.fleet.pool import WorkerPool
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

# After the timeout of the streams: to move the others, and to free their blocks.
MOVE_AND_FREE_S = 60.0
RPC_TIMEOUT_S = 5.0
PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """State of a drain. The last one is `done`, and `drained` if nothing is left."""

    open_streams: int = 0
    pinned_blocks: int = 0
    seconds: float = 0.0
    done: bool = False
    drained: bool = False
    moved_streams: int = 0


def member_to_drain(pool: WorkerPool, worker_id: str, *, force: bool) -> Member:
    """Raises InvalidRequest for an unknown worker, and Unavailable if its model is served now and
    could not be served without it, unless `force`."""
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


async def drain(
    fleet: Fleet, worker_id: str, *, timeout_s: float, force: bool, stop: bool
) -> AsyncGenerator[DrainProgress, None]:
    """Drain a worker and yield its progress. A caller that stops iterating leaves it draining.

    Raises as `member_to_drain`, and the error of the worker.
    """
    member = member_to_drain(fleet.pool, worker_id, force=force)
    loop, dialer = asyncio.get_running_loop(), fleet.dialer
    began = loop.time()
    async with dialer.open_channel(member.info.address) as channel:
        stub, metadata = WorkerStub(channel), dialer.metadata
        request = w.DrainRequest(timeout_s=timeout_s, stop=stop)
        call = stub.Drain(request, timeout=timeout_s + MOVE_AND_FREE_S, metadata=metadata)
        asking = asyncio.ensure_future(_reply(call))
        try:
            while not (await asyncio.wait({asking}, timeout=PERIOD_S))[0]:
                status = await stub.GetStatus(
                    w.GetStatusRequest(), timeout=RPC_TIMEOUT_S, metadata=metadata
                )
                # Somebody may have taken the drain back.
                done, pinned = not status.draining, _pinned(status.ledger)
                seconds = loop.time() - began
                yield DrainProgress(status.open_streams, pinned, seconds, done=done)
                if done:
                    return
            reply = asking.result()
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            call.cancel()
            asking.cancel()
            await asyncio.wait({asking})
    logger.info("worker %s: %s", worker_id, "drained" if reply.drained else "not drained")
    yield DrainProgress(
        open_streams=reply.ledger.engine_requests,
        pinned_blocks=_pinned(reply.ledger),
        seconds=loop.time() - began,
        done=True,
        drained=reply.drained,
        moved_streams=reply.moved_streams,
    )


async def undrain(fleet: Fleet, worker_id: str) -> None:
    """Put a drained worker back into service. Raises InvalidRequest, and the worker's error."""
    member = member_to_drain(fleet.pool, worker_id, force=True)
    async with fleet.dialer.open_channel(member.info.address) as channel:
        try:
            await WorkerStub(channel).Undrain(
                w.UndrainRequest(), timeout=RPC_TIMEOUT_S, metadata=fleet.dialer.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error


async def _reply(call: grpc.aio.UnaryUnaryCall[w.DrainRequest, w.DrainResponse]) -> w.DrainResponse:
    return await call


def _pinned(ledger: w.KvLedger) -> int:
    return ledger.in_flight_blocks + ledger.leased_blocks
