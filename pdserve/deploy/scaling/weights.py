"""Weights of a model's revisions at all routers, and results of each revision's requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.errors import Unavailable
from pdserve.net.rpc import error_from_rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.net.discovery import Discovery
    from pdserve.net.rpc import Dialer

TIMEOUT_S = 5.0


@dataclass(slots=True)
class RevisionFigures:
    """One revision over all routers. `shares`: share of new requests at each router, None without
    weights. `ready`: ready workers by role, the minimum over routers. `counts`: the sum over
    routers of `Revision.counts` (admin API)."""

    shares: list[float | None] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class RouterWeights:
    """Sets and reads the weights at every router that `discovery` finds. Both methods return the
    revisions of a model by name, and raise PdserveError if a router does not answer."""

    def __init__(self, discovery: Discovery, dialer: Dialer) -> None:
        self._discovery = discovery
        self._dialer = dialer

    async def revisions(self, model: str) -> dict[str, RevisionFigures]:
        return await self._ask(a.ListRevisionsRequest(model=model))

    async def set_weights(
        self, model: str, weights: Mapping[str, float]
    ) -> dict[str, RevisionFigures]:
        """Set the weights of a model. Empty weights make all its workers one pool. After an error,
        some routers may already have the new weights."""
        return await self._ask(a.SetWeightsRequest(model=model, weights=weights))

    async def _ask(
        self, request: a.SetWeightsRequest | a.ListRevisionsRequest
    ) -> dict[str, RevisionFigures]:
        routers = await self._discovery.addresses()
        if not routers:
            raise Unavailable("no router was found")
        replies = await asyncio.gather(*(_ask_one(self._dialer, x, request) for x in routers))
        found: dict[str, RevisionFigures] = {}
        for revision in (x for reply in replies for x in reply.revisions):
            _add(found.setdefault(revision.name, RevisionFigures()), revision)
        return found


async def _ask_one(
    dialer: Dialer, router: str, request: a.SetWeightsRequest | a.ListRevisionsRequest
) -> a.ListRevisionsResponse:
    async with dialer.open_channel(router) as channel:
        stub = AdminStub(channel)
        try:
            if isinstance(request, a.SetWeightsRequest):
                return await stub.SetWeights(request, timeout=TIMEOUT_S, metadata=dialer.metadata)
            return await stub.ListRevisions(request, timeout=TIMEOUT_S, metadata=dialer.metadata)
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error)
            raise type(found)(f"router {router}: {found.message}", field=found.field) from error


def _add(figures: RevisionFigures, report: a.Revision) -> None:
    """Add the report of one more router."""
    ready = dict(report.ready)
    if figures.shares:
        ready = {role: min(n, figures.ready.get(role, 0)) for role, n in ready.items()}
    figures.ready = ready
    figures.shares.append(report.share if report.HasField("share") else None)
    figures.counts.update(report.counts)
