"""Moves one worker at a time between prefill and decode, without a restart.

check ─► SetRole: it drains, and registers in its new role, draining still
      ─► prove: a canary through it and a partner
      ─► SettleRole: it is given work again, in the new role, or in the former one
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import deadline as deadlines
from pdserve import rpc, wire
from pdserve.errors import PdserveError, Unavailable, WorkerFailed
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.canary import prove
from router.member import MemberState
from router.roles.rules import is_left, partner_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.fleet import Fleet
    from router.member import Member
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

# Beyond the drain: the blocks of streams that went on elsewhere, and the worker's own word.
SET_ROLE_S = 45.0
RPC_S = 5.0
JOIN_S = 15.0
CANARY_S = 30.0


@dataclass(frozen=True, slots=True)
class Flip:
    """How a flip went: in seconds, and why it did not come to be, where it did not."""

    failure: str = ""
    drain_s: float = 0.0
    probe_s: float = 0.0
    total_s: float = 0.0
    moved_streams: int = 0


class Flips:
    """State: whether one is under way."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._worker_id = ""
        self._changed = asyncio.Event()
        fleet.subscribe(self._changed.set)

    async def flip(self, worker_id: str, role: Role, *, drain_timeout_s: float) -> Flip:
        """Raises InvalidRequest and Unavailable where it is not begun; whatever fails later is told
        by the result, and the worker is what it was."""
        if self._worker_id:
            raise Unavailable(f"worker {self._worker_id} changes its role now", retry_after_s=1.0)
        members = list(self._fleet.pool.members.values())
        partner = partner_for(members, worker_id, role)
        member = self._fleet.pool.members[worker_id]
        self._worker_id, began = worker_id, time.monotonic()
        try:
            done = await self._flip(member, partner, role, drain_timeout_s)
        finally:
            self._worker_id = ""
        done = replace(done, total_s=time.monotonic() - began)
        outcome = "failed" if done.failure else "done"
        self._metrics.flipped(member.info.model.name, role.value, outcome, done.total_s)
        logger.info("worker %s to %s: %s in %.2f s", worker_id, role, outcome, done.total_s)
        return done

    async def _flip(self, member: Member, partner: Member, role: Role, drain_s: float) -> Flip:
        dialer = self._fleet.dialer
        async with dialer.open_channel(member.info.address) as channel:
            stub, metadata = WorkerStub(channel), dialer.metadata
            try:
                request = w.SetRoleRequest(role=wire.role_to_pb(role), drain_timeout_s=drain_s)
                reply = await stub.SetRole(request, timeout=drain_s + SET_ROLE_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                # It may have changed all the same: then nobody settles it, and it changes back.
                return Flip(failure=rpc.error_from_rpc(error).message)
            done = Flip(drain_s=reply.drain_s, moved_streams=reply.moved_streams)
            keep, failure, probe_s = False, "the router is closing", 0.0
            try:
                began = time.monotonic()
                await self._prove(member.worker_id, partner, role)
                probe_s = time.monotonic() - began
                keep, failure = True, ""
            except PdserveError as error:
                failure = error.message
            finally:
                with suppress(grpc.aio.AioRpcError):
                    settle = w.SettleRoleRequest(keep=keep)
                    await stub.SettleRole(settle, timeout=RPC_S, metadata=metadata)
            settled = role if keep else member.info.role
            if not await self._is_within(lambda: self._is_ready(member.worker_id, settled)):
                failure = failure or "the worker did not come back"
            return replace(done, failure=failure, probe_s=probe_s)

    async def _prove(self, worker_id: str, partner: Member, role: Role) -> None:
        if not await self._is_within(lambda: self._has_joined(worker_id, role)):
            raise WorkerFailed("the worker did not register in its new role")
        worker = self._fleet.pool.members[worker_id]
        if partner.lost:
            raise Unavailable(f"worker {partner.worker_id}, its partner, is gone")
        pair = (partner, worker) if role is Role.DECODE else (worker, partner)
        await prove(self._fleet, *pair, timeout_s=CANARY_S)
        # Another router may have moved the others meanwhile.
        model, before = partner.info.model.name, partner.info.role
        if not is_left(list(self._fleet.pool.members.values()), model, before):
            raise Unavailable(f"no {before} worker of model {model} would be left")

    def _has_joined(self, worker_id: str, role: Role) -> bool:
        member = self._fleet.pool.members.get(worker_id)
        return member is not None and member.attached and member.info.role is role

    def _is_ready(self, worker_id: str, role: Role) -> bool:
        if not self._has_joined(worker_id, role):
            return False
        return self._fleet.pool.members[worker_id].state is MemberState.READY

    async def _is_within(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` holds in time; it is looked at whenever the fleet changes."""
        try:
            async with deadlines.timeout(deadlines.after(JOIN_S)):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
