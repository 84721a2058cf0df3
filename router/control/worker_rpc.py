"""Calls of the gRPC service of a worker."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.net import rpc
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.net.rpc import Dialer
    from pdserve.v1.worker_pb2_grpc import WorkerAsyncStub
    from router.fleet.member import Member

RPC_TIMEOUT_S = 5.0


@asynccontextmanager
async def worker_stub(dialer: Dialer, member: Member) -> AsyncIterator[WorkerAsyncStub]:
    """Connect to a worker. Raises its errors as PdserveError, prefixed with its id."""
    async with dialer.open_channel(member.info.address) as channel:
        try:
            yield WorkerStub(channel)
        except grpc.aio.AioRpcError as error:
            found = rpc.error_from_rpc(error)
            found.message = f"worker {member.worker_id}: {found.message}"
            raise found from error
