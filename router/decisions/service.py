"""The gRPC service for people who run a router: `pdserve.v1.Admin`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminServicer
from router.decisions.record import request_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from pdserve.types import WorkerInfo
    from router.decisions.log import DecisionLog, RequestDecisions

    Context = grpc.aio.ServicerContext[Any, Any]


class Admin(AdminServicer):
    """A face of the log: no state of its own."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

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
