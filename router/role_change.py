"""Changes the role of a worker between prefill and decode, without a restart.

check ─► SetRole: the worker drains, and registers in its new role, still draining
      ─► a probe through it and a partner
      ─► SettleRole: it serves in its new role, or in the former one
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable, WorkerFailed
from pdserve.kv_pairs import exchange, kind_of
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.health_checks import probe
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# After the drain: to free the blocks of streams that moved, and to answer.
SET_ROLE_S = 45.0
RPC_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Result of a role change. `failure` says why the worker has its former role, if it has."""

    failure: str = ""
    drain_s: float = 0.0
    probe_s: float = 0.0
    total_s: float = 0.0
    moved_streams: int = 0


class RoleChanger:
    """State: the worker whose role is changing."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._worker_id = ""

    async def change(self, worker_id: str, role: Role, *, drain_timeout_s: float) -> RoleChange:
        """Raises InvalidRequest and Unavailable if nothing was begun. If something fails later, the
        result says so, and the worker keeps its role."""
        if self._worker_id:
            raise Unavailable(f"worker {self._worker_id} is changing its role", retry_after_s=1.0)
        members, loop = self._fleet.pool.members, asyncio.get_running_loop()
        partner = partner_for(list(members.values()), worker_id, role)
        member = members[worker_id]
        self._worker_id, began = worker_id, loop.time()
        try:
            done = await self._change(member, partner, role, drain_timeout_s)
        finally:
            self._worker_id = ""
        done = replace(done, total_s=loop.time() - began)
        outcome = "failed" if done.failure else "done"
        labels = (member.info.model.name, role.value, outcome)
        self._metrics.observe("role_change_seconds", done.total_s, *labels)
        logger.info("worker %s to %s: %s in %.2f s", worker_id, role, outcome, done.total_s)
        return done

    async def _change(
        self, member: Member, partner: Member, role: Role, drain_s: float
    ) -> RoleChange:
        dialer, loop = self._fleet.dialer, asyncio.get_running_loop()
        async with dialer.open_channel(member.info.address) as channel:
            stub, metadata = WorkerStub(channel), dialer.metadata
            try:
                request = w.SetRoleRequest(role=wire.role_to_pb(role), drain_timeout_s=drain_s)
                reply = await stub.SetRole(request, timeout=drain_s + SET_ROLE_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                # If the worker changed all the same, it changes back when nobody settles it.
                return RoleChange(failure=rpc.error_from_rpc(error).message)
            done = RoleChange(drain_s=reply.drain_s, moved_streams=reply.moved_streams)
            keep, failure, probe_s = False, "the router is closing", 0.0
            try:
                began = loop.time()
                await self._probe(member.worker_id, partner, role)
                probe_s = loop.time() - began
                keep, failure = True, ""
            except PdserveError as error:
                failure = error.message
            finally:
                with suppress(grpc.aio.AioRpcError):
                    settle = w.SettleRoleRequest(keep=keep)
                    await stub.SettleRole(settle, timeout=RPC_TIMEOUT_S, metadata=metadata)
            settled = role if keep else member.info.role
            if not await self._has_joined(member.worker_id, settled, MemberState.READY):
                failure = failure or "the worker did not come back"
            return replace(done, failure=failure, probe_s=probe_s)

    async def _probe(self, worker_id: str, partner: Member, role: Role) -> None:
        if not await self._has_joined(worker_id, role):
            raise WorkerFailed("the worker did not register in its new role")
        worker = self._fleet.pool.members[worker_id]
        if partner.lost:
            raise Unavailable(f"its partner {partner.worker_id} is gone")
        decode, prefill = (worker, partner) if role is Role.DECODE else (partner, worker)
        await probe(self._fleet, decode, prefill)
        # Another router may have moved the others meanwhile.
        model, before = partner.info.model.name, partner.info.role
        if not is_left(list(self._fleet.pool.members.values()), model, before):
            raise Unavailable(f"no {before} worker of model {model} would be left")

    async def _has_joined(
        self, worker_id: str, role: Role, state: MemberState | None = None
    ) -> bool:
        """Wait until the worker is connected in `role`, and in `state`. Return False if it is not
        in time."""
        until = asyncio.get_running_loop().time() + JOIN_TIMEOUT_S
        while True:
            member = self._fleet.pool.members.get(worker_id)
            if (
                member is not None
                and member.attached
                and member.info.role is role
                and state in (None, member.state)
            ):
                return True
            if not await self._fleet.capacity_change(until=until):
                return False


def partner_for(members: Sequence[Member], worker_id: str, role: Role) -> Member:
    """Return a worker with which `worker_id` can be probed as a `role` worker.

    Raises InvalidRequest if the worker cannot have that role; Unavailable if it is not ready, or is
    the last one of its own role, or has no partner.
    """
    member = next((m for m in members if m.worker_id == worker_id and not m.lost), None)
    if member is None:
        raise InvalidRequest(f"no worker {worker_id} is registered", field="worker_id")
    before, model = member.info.role, member.info.model.name
    if Role.AGGREGATED in (role, before) or role is before:
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


def is_left(members: Sequence[Member], model: str, role: Role) -> bool:
    """Return True if a `role` worker of a model is ready."""
    return any(
        m.state is MemberState.READY and m.info.role is role and m.info.model.name == model
        for m in members
    )
