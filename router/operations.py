"""Takes workers out of service and back, and changes their role, without a restart.

drain        the worker takes no more requests, moves those it has, and frees their blocks
undrain      it takes requests again
role change  SetRole: the worker drains, and registers in its new role, still draining
             ─► a probe through it and a partner
             ─► SettleRole: it serves in its new role, or in the former one

The worker tells every router that it drains and when to move its requests, so any router can be
asked.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable, WorkerFailed
from pdserve.kv_pairs import exchange, kind_of
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.health_checks import probe
from router.placement.filters import check_servable
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

    from pdserve.v1.worker_pb2_grpc import WorkerAsyncStub
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# After the timeout of the streams: to move the others, and to free their blocks.
MOVE_AND_FREE_S = 60.0
RPC_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 15.0
PERIOD_S = 0.25
MAX_DRAIN_S = 86400.0


def _check_timeout(seconds: float, *, field: str) -> None:
    """Raises InvalidRequest for seconds that no drain may take."""
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise InvalidRequest(f"{field} must be between 0 and {MAX_DRAIN_S:g}", field=field)


@asynccontextmanager
async def worker_stub(fleet: Fleet, member: Member) -> AsyncIterator[WorkerAsyncStub]:
    """Connect to a worker. Raises its errors as PdserveError, with its name."""
    async with fleet.dialer.open_channel(member.info.address) as channel:
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


async def drain(
    fleet: Fleet, worker_id: str, *, timeout_s: float, force: bool, stop: bool
) -> AsyncGenerator[a.DrainProgress, None]:
    """Drain a worker and yield its progress. A caller that stops iterating leaves it draining.

    Raises InvalidRequest, naming the field, Unavailable if its model could not be served
    without it, unless `force`, and the error of the worker.
    """
    _check_timeout(timeout_s, field="timeout_s")
    member = _registered(fleet.members.values(), worker_id)
    model = member.info.model.name
    if not force and member.state is MemberState.READY:
        candidates = fleet.candidates(model)
        check_servable(candidates, model)
        try:
            check_servable([c for c in candidates if c.worker_id != worker_id], model)
        except Unavailable as error:
            raise Unavailable(f"without worker {worker_id}: {error.message}") from error
    loop, metadata = asyncio.get_running_loop(), fleet.dialer.metadata
    began = loop.time()

    def progress(streams: int, ledger: w.KvLedger, **fields: Any) -> a.DrainProgress:
        pinned, seconds = ledger.in_flight_blocks + ledger.leased_blocks, loop.time() - began
        return a.DrainProgress(
            open_streams=streams, pinned_blocks=pinned, seconds=seconds, **fields
        )

    async with worker_stub(fleet, member) as stub:
        request = w.DrainRequest(timeout_s=timeout_s, stop=stop)
        call = stub.Drain(request, timeout=timeout_s + MOVE_AND_FREE_S, metadata=metadata)
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


async def undrain(fleet: Fleet, worker_id: str) -> None:
    """Raises InvalidRequest for an unknown worker, and the worker's error."""
    async with worker_stub(fleet, _registered(fleet.members.values(), worker_id)) as stub:
        await stub.Undrain(
            w.UndrainRequest(), timeout=RPC_TIMEOUT_S, metadata=fleet.dialer.metadata
        )


class RoleChanger:
    """State: the worker whose role is changing."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._worker_id = ""

    @property
    def changing(self) -> str:
        """The worker whose role is changing, "" if none is."""
        return self._worker_id

    async def change(
        self, worker_id: str, role: Role, *, drain_timeout_s: float
    ) -> a.ChangeRoleResponse:
        """Raises InvalidRequest and Unavailable if nothing was begun. If something fails later, the
        `failure` of the result says so, and the worker keeps its role."""
        _check_timeout(drain_timeout_s, field="drain_timeout_s")
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
        logger.info("worker %s to %s: %s in %.2f s", worker_id, role, outcome, done.total_s)
        return done

    async def _change(
        self,
        member: Member,
        partner: Member,
        role: Role,
        drain_s: float,
        done: a.ChangeRoleResponse,
    ) -> None:
        metadata, loop = self._fleet.dialer.metadata, asyncio.get_running_loop()
        async with worker_stub(self._fleet, member) as stub:
            request = w.SetRoleRequest(role=wire.role_to_pb(role), drain_timeout_s=drain_s)
            # If this fails and the worker changed all the same, it changes back by itself.
            timeout_s = drain_s + MOVE_AND_FREE_S
            reply = await stub.SetRole(request, timeout=timeout_s, metadata=metadata)
            done.drain_s, done.moved_streams = reply.drain_s, reply.moved_streams
            settled, began = member.info.role, loop.time()
            try:
                await self._probe(member.worker_id, partner, role)
                settled, done.probe_s = role, loop.time() - began
            except PdserveError as error:
                done.failure = error.message
            finally:
                with suppress(grpc.aio.AioRpcError):
                    settle = w.SettleRoleRequest(keep=settled is role)
                    await stub.SettleRole(settle, timeout=RPC_TIMEOUT_S, metadata=metadata)
        if not await self._has_joined(member.worker_id, settled, MemberState.READY):
            done.failure = done.failure or "the worker did not come back"

    async def _probe(self, worker_id: str, partner: Member, role: Role) -> None:
        if not await self._has_joined(worker_id, role, *MemberState):
            raise WorkerFailed("the worker did not register in its new role")
        worker = self._fleet.members[worker_id]
        if partner.lost:
            raise Unavailable(f"its partner {partner.worker_id} is gone")
        decode, prefill = (worker, partner) if role is Role.DECODE else (partner, worker)
        await probe(self._fleet, decode, prefill)
        # Another router may have moved the others meanwhile.
        model, before = partner.info.model.name, partner.info.role
        if not is_left(self._fleet.members.values(), model, before):
            raise Unavailable(f"no {before} worker of model {model} would be left")

    async def _has_joined(self, worker_id: str, role: Role, *states: MemberState) -> bool:
        """Wait until the worker is connected in `role` and one of `states`. Return False if it is
        not in time."""
        until = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
        while True:
            member = self._fleet.members.get(worker_id)
            is_there = member is not None and member.attached and member.info.role is role
            if member is not None and is_there and member.state in states:
                return True
            if not await self._fleet.capacity_change(until=until):
                return False


def partner_for(members: Sequence[Member], worker_id: str, role: Role) -> Member:
    """Return a worker with which `worker_id` can be probed as a `role` worker.

    Raises InvalidRequest if the worker cannot have that role; Unavailable if it is not ready, or is
    the last one of its own role, or has no partner.
    """
    member = _registered(members, worker_id)
    before, model = member.info.role, member.info.model.name
    if {role, before} != {Role.PREFILL, Role.DECODE}:
        raise InvalidRequest(
            f"worker {worker_id} is a {before} worker and cannot become a {role} worker",
            field="role",
        )
    if member.state is not MemberState.READY:
        raise Unavailable(f"worker {worker_id} is {member.state}", retry_after_s=1.0)
    others = [m for m in members if m is not member]
    if not is_left(others, model, before):
        raise Unavailable(f"worker {worker_id} is the last {before} worker of model {model}")
    own = kind_of(replace(member.info, role=role))
    for other in others:
        if not is_left([other], model, before):
            continue
        pair = (kind_of(other.info), own) if role is Role.DECODE else (own, kind_of(other.info))
        if exchange(*pair):
            return other
    raise Unavailable(f"no {before} worker can exchange KV with worker {worker_id}")


def is_left(members: Iterable[Member], model: str, role: Role) -> bool:
    """Return True if a `role` worker of a model is ready."""
    return any(
        m.state is MemberState.READY and m.info.role is role and m.info.model.name == model
        for m in members
    )
