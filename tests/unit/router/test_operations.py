"""What the router says of a worker's drain, whose two calls a busy worker may take in any order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from router import operations
from router.fleet.registry import Fleet
from tests.fakes import ScriptedWorker

if TYPE_CHECKING:
    import grpc.aio


class DrainingWorker(ScriptedWorker):
    """Says of itself what `drains` holds, one after the other. Its drain ends when that is empty,
    but never if it was taken back."""

    def __init__(self, *drains: bool) -> None:
        super().__init__("d", Role.DECODE)
        self._drains = list(drains)
        self._emptied = asyncio.Event()

    async def GetStatus(  # noqa: N802
        self, request: w.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> w.WorkerStatus:
        draining = not self._drains or self._drains.pop(0)
        if draining and not self._drains:
            self._emptied.set()
        return w.WorkerStatus(draining=draining)

    async def Drain(  # noqa: N802
        self, request: w.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> w.DrainResponse:
        await self._emptied.wait()
        return w.DrainResponse(drained=True)


@pytest.mark.parametrize(
    ("drains", "drained"),
    [
        pytest.param((False, True), True, id="the worker takes up the call late"),
        pytest.param((True, False), False, id="somebody takes the drain back"),
    ],
)
async def test_a_drain_ends_when_the_worker_has_begun_and_ended_it(
    monkeypatch: pytest.MonkeyPatch, drains: tuple[bool, ...], drained: bool
) -> None:
    monkeypatch.setattr(operations, "PERIOD_S", 0.01)
    worker, fleet = (
        DrainingWorker(*drains),
        Fleet(router_id="router-1", lease_s=5.0, clock=lambda: 0.0),
    )
    async with worker.serving(), fleet:
        fleet.register(worker.info)
        steps = operations.drain(fleet, "d", timeout_s=1.0, force=True, stop=False)
        *before, last = [step async for step in steps]
    assert not any(step.done for step in before)
    assert (last.done, last.drained) == (True, drained)
