"""Reports of workers in a crash loop to routers, which cannot see why a worker is missing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.net.rpc import Dialer

REPORT_EVERY_S = 1.0  # well below a lease, after which a router drops a report
_ANSWER_S = 2.0


async def report_crash_loops(
    dialer: Dialer, routers: Collection[str], workers: Collection[w.CrashLoop]
) -> None:
    """Report `workers` to every router. Ignore routers that do not answer: the report is repeated
    every REPORT_EVERY_S."""
    request = w.ReportCrashLoopsRequest(workers=workers)

    async def report(address: str) -> None:
        async with dialer.open_channel(address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await RegistryStub(channel).ReportCrashLoops(
                    request, timeout=_ANSWER_S, metadata=dialer.metadata
                )

    if workers:
        await asyncio.gather(*map(report, routers))
