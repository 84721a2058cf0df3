"""The gRPC service through which workers join, renew their lease and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryServicer
from router.breaker import BreakerState
from router.cost.wire import costs_to_pb, steps_to_pb
from router.roles.wire import roles_to_pb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from router.breaker import Breaker
    from router.cost.book import CostBook
    from router.fleet import Fleet
    from router.member import Member
    from router.roles.controller import Verdict

    Context = grpc.aio.ServicerContext[Any, Any]


class Registry(RegistryServicer):
    """A face of the fleet: no state of its own."""

    def __init__(
        self,
        fleet: Fleet,
        costs: CostBook | None = None,
        roles: Mapping[str, Verdict] | None = None,
    ) -> None:
        self._roles = {} if roles is None else roles
        self._fleet = fleet
        self._costs = costs

    async def Register(  # noqa: N802
        self, request: w.RegisterRequest, context: Context
    ) -> w.RegisterResponse:
        try:
            info = wire.worker_from_pb(request.worker)
            self._fleet.register(info, draining=request.draining)
        except InvalidRequest as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.RegisterResponse(lease_s=self._fleet.lease_s)

    async def Renew(  # noqa: N802
        self, request: w.RenewRequest, context: Context
    ) -> w.RenewResponse:
        load = wire.load_from_pb(request.load) if request.HasField("load") else None
        try:
            kv = wire.kv_report_from_pb(request.kv) if request.HasField("kv") else None
        except InvalidRequest as refusal:
            await rpc.abort(context, refusal)
        known = self._fleet.renew(
            request.worker_id,
            request.instance_id,
            load=load,
            draining=request.draining,
            kv=kv,
            unhealthy=request.unhealthy,
            moving=request.moving,
        )
        if not known:
            error = Unavailable(f"worker {request.worker_id} is not registered")
            await rpc.abort(context, error, status=grpc.StatusCode.NOT_FOUND)
        return w.RenewResponse(lease_s=self._fleet.lease_s)

    async def Deregister(  # noqa: N802
        self, request: w.DeregisterRequest, context: Context
    ) -> w.DeregisterResponse:
        self._fleet.deregister(request.worker_id, request.instance_id)
        return w.DeregisterResponse()

    async def ListWorkers(  # noqa: N802
        self, request: w.ListWorkersRequest, context: Context
    ) -> w.ListWorkersResponse:
        now = self._fleet.now()
        members = self._fleet.pool.members.values()
        return w.ListWorkersResponse(
            workers=[self._entry(member, now) for member in members],
            probes_passed=self._fleet.quarantine.canaries["whole"],
            probes_failed=self._fleet.quarantine.canaries["failed"],
            costs=()
            if self._costs is None
            else costs_to_pb(self._costs, self._fleet.pool.models()),
            roles=roles_to_pb(self._roles),
            ejected_pairs=[
                w.EjectedPair(
                    prefill_worker=pair.prefill,
                    decode_worker=pair.decode,
                    remaining_s=pair.remaining_s,
                    failures=pair.strikes,
                    reason=pair.reason,
                )
                for pair in self._fleet.quarantine.listed(now)
            ],
        )

    def _entry(self, member: Member, now: float) -> w.WorkerEntry:
        entry = _entry(member, now)
        if not member.lost:
            entry.lease_remaining_s = max(0.0, member.lease_end - self._fleet.lease_now())
        if self._costs is not None and member.steps is not None:
            entry.steps.CopyFrom(steps_to_pb(self._costs.step_model(member.worker_id)))
        return entry


def _entry(member: Member, now: float) -> w.WorkerEntry:
    prefills = member.info.role is Role.PREFILL
    return w.WorkerEntry(
        info=wire.worker_to_pb(member.info),
        load=None if member.load is None else wire.load_to_pb(member.load),
        state=member.state.value,
        outstanding_requests=member.outstanding_requests,
        outstanding_tokens=member.outstanding_tokens if prefills else member.reserved_tokens,
        breaker=_breaker(member.breaker, now),
        unhealthy=member.unhealthy,
    )


def _breaker(breaker: Breaker, now: float) -> w.Breaker | None:
    state = breaker.state(now)
    if state is BreakerState.CLOSED:
        return None
    return w.Breaker(
        state=state.value,
        reason=breaker.reason,
        remaining_s=breaker.remaining_s(now),
        failures=breaker.failures,
    )
