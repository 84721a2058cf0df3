"""Weights of a model's revisions at all routers, and how the requests of each revision went."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from pdserve.errors import Unavailable, is_service_error
from pdserve.rpc import error_from_rpc
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.rpc import Dialer

TIMEOUT_S = 5.0
# Reason of retries that follow no failure.
_MOVED = "moved"


@dataclass(slots=True)
class RevisionFigures:
    """One revision as all routers see it.

    `shares` of new requests, one a router, None without weights; `ready` workers by role, as the
    router sees them that sees the fewest. Added up over routers: `requests` that ended, those that
    `failed` by a fault of the service, attempts that were `retried` after a failure, answers that
    were `judged` by target ("ttft", "tpot"), and those that `met` it.
    """

    shares: list[float | None] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    failed: int = 0
    retried: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)


async def set_weights(
    dialer: Dialer, routers: Sequence[str], model: str, weights: Mapping[str, float]
) -> dict[str, RevisionFigures]:
    """Set the weights of a model at every router; none makes all its workers one pool. Return the
    revisions as `list_revisions` does. Raises PdserveError: routers may have got them then."""
    return await _ask(dialer, routers, a.SetWeightsRequest(model=model, weights=weights))


async def list_revisions(
    dialer: Dialer, routers: Sequence[str], model: str
) -> dict[str, RevisionFigures]:
    """Return the revisions of a model by name. Raises PdserveError if a router does not answer."""
    return await _ask(dialer, routers, a.ListRevisionsRequest(model=model))


async def _ask(
    dialer: Dialer, routers: Sequence[str], request: a.SetWeightsRequest | a.ListRevisionsRequest
) -> dict[str, RevisionFigures]:
    if not routers:
        raise Unavailable("no router was found")
    replies = await asyncio.gather(*(_ask_one(dialer, router, request) for router in routers))
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


def _add(figures: RevisionFigures, told: a.Revision) -> None:
    """Add what one more router tells."""
    ready = dict(told.ready)
    if figures.shares:
        ready = {role: min(n, figures.ready.get(role, 0)) for role, n in ready.items()}
    figures.ready = ready
    figures.shares.append(told.share if told.HasField("share") else None)
    figures.requests += sum(told.outcomes.values())
    figures.failed += sum(n for code, n in told.outcomes.items() if is_service_error(code))
    figures.retried += sum(n for reason, n in told.retries.items() if reason != _MOVED)
    figures.judged.update(told.judged)
    figures.met.update(told.met)
