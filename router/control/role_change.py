"""Changes the role of a worker without a restart.

SetRole: the worker drains, and registers in its new role, still draining
─► a probe through the worker and a partner
─► SettleRole: the worker serves in its new role, or in its former one
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable, WorkerFailed
from pdserve.kv_compatibility import exchange, kind_of
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from router.control.drain import MOVE_AND_FREE_S, registered
from router.control.probes import probe
from router.control.worker_rpc import RPC_TIMEOUT_S, worker_stub
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.net.rpc import Dialer
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Links
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 15.0


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
            # If the call fails although the worker has changed, it changes back by itself, because
            # its role is not settled.
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
    member = registered(members, worker_id)
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
