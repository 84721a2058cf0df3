"""Takes workers, or a router, out of service and back, without a restart.

drain    the worker accepts no requests, its open requests move or end, and it frees all blocks
undrain  the worker accepts requests again

The worker reports to every router that it drains and when to move its requests. Any router can
therefore drain it. A router that drains has new requests served in other regions.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pdserve import wire
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import GENERATING
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from router.control.worker_rpc import RPC_TIMEOUT_S, worker_stub
from router.placement.filters import check_servable
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from pdserve.net.rpc import Dialer
    from router.admission import AdmissionController
    from router.fleet.member import Member
    from router.fleet.peers import RegionPeers
    from router.fleet.registry import Fleet

logger = logging.getLogger(__name__)

# Seconds after the timeout of the streams, to move the remaining ones and to free their blocks.
MOVE_AND_FREE_S = 60.0
PERIOD_S = 0.25


def registered(members: Iterable[Member], worker_id: str) -> Member:
    """Return the worker with this id. Raises InvalidRequest if it is unknown or lost."""
    member = next((m for m in members if m.worker_id == worker_id and not m.lost), None)
    if member is None:
        raise InvalidRequest(f"no worker {worker_id} is registered", field="worker_id")
    return member


class RouterDrainer:
    """Has new requests of this router served in other regions."""

    def __init__(self, peers: RegionPeers, admission: AdmissionController) -> None:
        self._peers, self._admission = peers, admission

    async def drain(
        self, *, timeout_s: float, force: bool
    ) -> AsyncGenerator[a.DrainProgress, None]:
        """Drain, and yield how many requests are open here until none is, or until the timeout.

        Raises InvalidRequest for the timeout, and Unavailable if no other region takes requests,
        unless `force`.
        """
        wire.check_drain_timeout(timeout_s, field="timeout_s")
        peers, admission, now = self._peers, self._admission, asyncio.get_running_loop().time
        if not (force or peers.models()):
            others = "; ".join(f"{x.region}: {x.reason}" for x in peers.views())
            text = f"no other region takes requests ({others or 'router.peers is empty'})"
            raise Unavailable(f"{text}; --force drains the router anyway, which refuses all")
        peers.draining, began = True, now()
        logger.info("the router drains: new requests go to other regions")
        while True:
            left, seconds = admission.running + admission.queued, now() - began
            done = not left or seconds >= timeout_s
            yield a.DrainProgress(open_streams=left, seconds=seconds, done=done, drained=not left)
            if done:
                return
            await asyncio.sleep(PERIOD_S)

    def undrain(self) -> None:
        """Serve new requests here again."""
        self._peers.draining = False
        logger.info("the router serves requests again")


class Drainer:
    """Drains workers, and ends their drains."""

    def __init__(self, fleet: Fleet, dialer: Dialer) -> None:
        self._fleet, self._dialer = fleet, dialer

    async def drain(
        self, worker_id: str, *, timeout_s: float, force: bool, stop: bool
    ) -> AsyncGenerator[a.DrainProgress, None]:
        """Drain a worker and yield its progress. It stays draining if the caller stops iterating.

        Raises InvalidRequest, naming the field; Unavailable if its model could not be served
        without it, unless `force`; and the errors of the worker.
        """
        wire.check_drain_timeout(timeout_s, field="timeout_s")
        member = registered(self._fleet.members.values(), worker_id)
        if stop and (group := member.info.group):
            text = f"worker {worker_id} is a rank of group {group}, whose ranks end together"
            raise InvalidRequest(text, field="stop")
        if not force and member.state is MemberState.READY:
            self._check_unneeded(member)
        loop, metadata = asyncio.get_running_loop(), self._dialer.metadata
        began = loop.time()

        def progress(streams: int, ledger: w.KvLedger, **fields: Any) -> a.DrainProgress:
            pinned, seconds = ledger.in_flight_blocks + ledger.leased_blocks, loop.time() - began
            return a.DrainProgress(
                open_streams=streams, pinned_blocks=pinned, seconds=seconds, **fields
            )

        async with worker_stub(self._dialer, member) as stub:
            request = w.DrainRequest(timeout_s=timeout_s, stop=stop)
            call = stub.Drain(request, timeout=timeout_s + MOVE_AND_FREE_S, metadata=metadata)
            # The call Drain returns only at its end, so progress is polled meanwhile.
            asking = asyncio.ensure_future(call)
            try:
                while not (await asyncio.wait({asking}, timeout=PERIOD_S))[0]:
                    status = await stub.GetStatus(
                        w.GetStatusRequest(), timeout=RPC_TIMEOUT_S, metadata=metadata
                    )
                    yield progress(status.open_streams, status.ledger)
                reply = asking.result()
            finally:
                call.cancel()
                asking.cancel()
                await asyncio.wait({asking})
        logger.info("worker %s: %s", worker_id, "drained" if reply.drained else "not drained")
        yield progress(
            reply.ledger.engine_requests,
            reply.ledger,
            done=True,
            drained=reply.drained,
            moved_streams=reply.moved_streams,
        )

    def _check_unneeded(self, member: Member) -> None:
        """Raise Unavailable if the other workers cannot serve the model of `member`."""
        model, role = member.info.model.name, member.info.role
        try:
            if role not in GENERATING:
                if self._fleet.is_last(member):
                    raise Unavailable(f"no {role} worker is ready for model {model}")
                return
            found = self._fleet.candidates(model)
            # Without a pair now, answers run aggregated: one other worker of any role is enough.
            aggregated = True
            with suppress(Unavailable):
                check_servable(found, model)
                aggregated = False
            others = [c for c in found if c.worker_id != member.worker_id]
            check_servable(others, model, aggregated=aggregated)
        except Unavailable as error:
            text = f"without worker {member.worker_id}: {error.message}; --force drains it anyway"
            raise Unavailable(text) from error

    async def undrain(self, worker_id: str) -> None:
        """End the drain of a worker. Raises InvalidRequest for an unknown worker, and the errors of
        the worker."""
        member = registered(self._fleet.members.values(), worker_id)
        metadata = self._dialer.metadata
        async with worker_stub(self._dialer, member) as stub:
            await stub.Undrain(w.UndrainRequest(), timeout=RPC_TIMEOUT_S, metadata=metadata)
