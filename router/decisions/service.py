"""The gRPC service for people who run a router: `pdserve.v1.Admin`."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminServicer
from router.decisions.record import request_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from pdserve.types import WorkerInfo
    from router.decisions.log import DecisionLog, RequestDecisions
    from router.drains import Drains
    from router.roles.flips import Flips

    Context = grpc.aio.ServicerContext[Any, Any]


MAX_DRAIN_S = 86400.0


class Admin(AdminServicer):
    """A face of the log, the flips and the drains: no state of its own."""

    def __init__(self, log: DecisionLog, flips: Flips, drains: Drains) -> None:
        self._log = log
        self._flips = flips
        self._drains = drains

    # Written, not yielded, as in `router/generation.py`.
    async def Explain(  # type: ignore[override]  # noqa: N802
        self, request: a.ExplainRequest, context: Context
    ) -> None:
        if request.request_id:
            found = self._log.of(request.request_id)
            if found is None:
                unknown = InvalidRequest(
                    f"no decision for request {request.request_id} is kept", field="request_id"
                )
                await rpc.abort(context, unknown, status=grpc.StatusCode.NOT_FOUND)
            requests: Iterable[RequestDecisions] = [found]
        else:
            requests = self._log.all()
        for message in explained(requests):
            await context.write(message)

    async def ChangeRole(  # noqa: N802
        self, request: a.ChangeRoleRequest, context: Context
    ) -> a.ChangeRoleResponse:
        try:
            _check_timeout(request.drain_timeout_s, field="drain_timeout_s")
            role = wire.role_from_pb(request.role)
            done = await self._flips.flip(
                request.worker_id, role, drain_timeout_s=request.drain_timeout_s
            )
        except PdserveError as error:
            await rpc.abort(context, error)
        return a.ChangeRoleResponse(**asdict(done))

    async def DrainWorker(  # type: ignore[override]  # noqa: N802
        self, request: a.DrainWorkerRequest, context: Context
    ) -> None:
        try:
            _check_timeout(request.timeout_s, field="timeout_s")
            steps = self._drains.drain(
                request.worker_id,
                timeout_s=request.timeout_s,
                force=request.force,
                stop=request.stop,
            )
            async with aclosing(steps):
                async for progress in steps:
                    await context.write(a.DrainProgress(**asdict(progress)))
        except PdserveError as error:
            await rpc.abort(context, error)

    async def UndrainWorker(  # noqa: N802
        self, request: a.UndrainWorkerRequest, context: Context
    ) -> a.UndrainWorkerResponse:
        try:
            await self._drains.undrain(request.worker_id)
        except PdserveError as error:
            await rpc.abort(context, error)
        return a.UndrainWorkerResponse()


def _check_timeout(seconds: float, *, field: str) -> None:
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise InvalidRequest(f"{field} must be between 0 and {MAX_DRAIN_S:g}", field=field)


def explained(requests: Iterable[RequestDecisions]) -> Iterator[a.Explained]:
    """Each request, and before it the workers that it names and that were not said so yet."""
    said: dict[str, WorkerInfo] = {}
    for request in requests:
        for recorded in request.decisions:
            for candidate in recorded.decision.candidates:
                if said.get(candidate.worker_id) != candidate.info:
                    said[candidate.worker_id] = candidate.info
                    yield a.Explained(worker=wire.worker_to_pb(candidate.info))
        yield a.Explained(request=request_to_pb(request))
