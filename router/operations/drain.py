"""Takes workers out of service and back, and changes their role, without a restart.

drain        the worker accepts no requests, its open requests move or end, and it frees all blocks
undrain      the worker accepts requests again
role change  SetRole: the worker drains, and registers in its new role, still draining
             ─► a probe through the worker and a partner
             ─► SettleRole: the worker serves in its new role, or in its former one

The worker reports to every router that it drains and when to move its requests. Any router can
therefore run these operations.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable, WorkerFailed
from pdserve.kv_compatibility import exchange, kind_of
from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.operations.probes import probe
from router.placement.filters import check_servable
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

    from pdserve.net.rpc import Dialer
    from pdserve.v1.worker_pb2_grpc import WorkerAsyncStub
    from router.fleet.connection import Links
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Seconds after the timeout of the streams, to move the remaining ones and to free their blocks.
MOVE_AND_FREE_S = 60.0
RPC_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 15.0
PERIOD_S = 0.25


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


def _registered(members: Iterable[Member], worker_id: str) -> Member:
    member = next((m for m in members if m.worker_id == worker_id and not m.lost), None)
    if member is None:
        raise InvalidRequest(f"no worker {worker_id} is registered", field="worker_id")
    return member


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
        member = _registered(self._fleet.members.values(), worker_id)
        model = member.info.model.name
        if stop and (group := member.info.group):
            text = f"worker {worker_id} is a rank of group {group}, whose ranks end together"
            raise InvalidRequest(text, field="stop")
        if not force and member.state is MemberState.READY:
            candidates = self._fleet.candidates(model)
            # First with the worker: a model that cannot be served now is not the drain's fault.
            check_servable(candidates, model)
            try:
                check_servable([c for c in candidates if c.worker_id != worker_id], model)
            except Unavailable as error:
                raise Unavailable(f"without worker {worker_id}: {error.message}") from error
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
            # Drain answers only at its end, so progress is polled meanwhile.
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

    async def undrain(self, worker_id: str) -> None:
        """End the drain of a worker. Raises InvalidRequest for an unknown worker, and the errors of
        the worker."""
        member = _registered(self._fleet.members.values(), worker_id)
        metadata = self._dialer.metadata
        async with worker_stub(self._dialer, member) as stub:
            await stub.Undrain(w.UndrainRequest(), timeout=RPC_TIMEOUT_S, metadata=metadata)


class RoleChanger:
    """Changes roles, one worker at a time. State: the worker whose role is changing."""

    def __init__(self, fleet: Fleet, links: Links, dialer: Dialer, metrics: RouterMetrics) -> None:
        self._fleet, self._links, self._dialer = fleet, links, dialer
        self._metrics = metrics
        self._worker_id = ""

    @property
    def changing(self) -> str:
        """The worker whose role is changing, "" if none is."""
        return self._worker_id

    async def change(
        self, worker_id: str, role: Role, *, drain_timeout_s: float
    ) -> a.ChangeRoleResponse:
        """Change the role of a worker and return the result.

        Raises InvalidRequest and Unavailable before anything has changed. A later failure is
        reported in `failure` of the result, and the worker keeps its role.
        """
        wire.check_drain_timeout(drain_timeout_s, field="drain_timeout_s")
        # One at a time, so that two changes together do not take the last worker of a role.
        if self._worker_id:
            raise Unavailable(f"worker {self._worker_id} is changing its role", retry_after_s=1.0)
        fleet, loop = self._fleet, asyncio.get_running_loop()
        partner = partner_for(list(fleet.members.values()), worker_id, role)
        member, done = fleet.members[worker_id], a.ChangeRoleResponse()
        self._worker_id, began = worker_id, loop.time()
        try:
            await self._change(member, partner, role, drain_timeout_s, done)
        except PdserveError as error:
            done.failure = error.message
        finally:
            self._worker_id = ""
        done.total_s = loop.time() - began
        outcome = "failed" if done.failure else "done"
        model = member.info.model.name
        self._metrics.observe("role_change_seconds", done.total_s, model, role.value, outcome)
        logger.info(
            "role change of worker %s to %s: %s in %.2f s", worker_id, role, outcome, done.total_s
        )
        return done

    async def _change(
        self,
        member: Member,
        partner: Member,
        role: Role,
        drain_s: float,
        done: a.ChangeRoleResponse,
    ) -> None:
        metadata, loop = self._dialer.metadata, asyncio.get_running_loop()
        async with worker_stub(self._dialer, member) as stub:
            request = w.SetRoleRequest(role=wire.role_to_pb(role), drain_timeout_s=drain_s)
            # If the call fails although the worker has changed, it changes back by itself: nobody
            # settles its role.
            timeout_s = drain_s + MOVE_AND_FREE_S
            reply = await stub.SetRole(request, timeout=timeout_s, metadata=metadata)
            done.drain_s, done.moved_streams = reply.drain_s, reply.moved_streams
            final_role, began = member.info.role, loop.time()
            try:
                await self._probe(member.worker_id, partner, role)
                final_role, done.probe_s = role, loop.time() - began
            except PdserveError as error:
                done.failure = error.message
            finally:
                # If this fails, the worker undoes the change by itself, and the check below fails.
                with suppress(grpc.aio.AioRpcError):
                    settle = w.SettleRoleRequest(keep=final_role is role)
                    await stub.SettleRole(settle, timeout=RPC_TIMEOUT_S, metadata=metadata)
        if not await self._has_joined(member.worker_id, final_role, MemberState.READY):
            done.failure = done.failure or "the worker did not come back"

    async def _probe(self, worker_id: str, partner: Member, role: Role) -> None:
        if not await self._has_joined(worker_id, role, *MemberState):
            raise WorkerFailed("the worker did not register in its new role")
        worker = self._fleet.members[worker_id]
        if partner.lost:
            raise Unavailable(f"its partner {partner.worker_id} is gone")
        decode, prefill = (worker, partner) if role is Role.DECODE else (partner, worker)
        await probe(self._fleet, self._links, decode, prefill)
        # Another router may have changed the roles of other workers meanwhile.
        model, before = partner.info.model.name, partner.info.role
        if not has_ready_worker(self._fleet.members.values(), model, before):
            raise Unavailable(f"no {before} worker of model {model} would be left")

    async def _has_joined(self, worker_id: str, role: Role, *states: MemberState) -> bool:
        """Wait until the worker is connected in `role` and in one of `states`. Return False after
        JOIN_TIMEOUT_S."""
        until = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
        while True:
            member = self._fleet.members.get(worker_id)
            is_there = member is not None and member.attached and member.info.role is role
            if member is not None and is_there and member.state in states:
                return True
            if not await self._fleet.capacity_change(until=until):
                return False


def partner_for(members: Sequence[Member], worker_id: str, role: Role) -> Member:
    """Return a partner with which `worker_id` can be probed as a `role` worker.

    Raises InvalidRequest if the worker cannot have that role. Raises Unavailable if it is not
    ready, is the last worker of its present role, or has no partner.
    """
    member = _registered(members, worker_id)
    before, model = member.info.role, member.info.model.name
    if {role, before} != {Role.PREFILL, Role.DECODE}:
        raise InvalidRequest(
            f"worker {worker_id} is a {before} worker and cannot become a {role} worker",
            field="role",
        )
    if group := member.info.group:
        text = f"worker {worker_id} is a rank of group {group}, whose ranks keep their role"
        raise InvalidRequest(text, field="worker_id")
    if member.state is not MemberState.READY:
        raise Unavailable(f"worker {worker_id} is {member.state}", retry_after_s=1.0)
    others = [m for m in members if m is not member]
    if not has_ready_worker(others, model, before):
        raise Unavailable(f"worker {worker_id} is the last {before} worker of model {model}")
    own = kind_of(replace(member.info, role=role))
    for other in others:
        if not has_ready_worker([other], model, before):
            continue
        pair = (kind_of(other.info), own) if role is Role.DECODE else (own, kind_of(other.info))
        if exchange(*pair):
            return other
    raise Unavailable(f"no {before} worker can exchange KV with worker {worker_id}")


def has_ready_worker(members: Iterable[Member], model: str, role: Role) -> bool:
    """Return True if any `role` worker of a model in `members` is ready."""
    return any(
        m.state is MemberState.READY and m.info.role is role and m.info.model.name == model
        for m in members
    )
