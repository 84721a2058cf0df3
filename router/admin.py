"""gRPC services beside `Generation`: `Registry` for workers, `Admin` for operators."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from pdserve import rpc, wire
from pdserve.config import is_address
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminServicer
from pdserve.v1.worker_pb2_grpc import RegistryServicer
from router.decisions import explained
from router.operations import drain, undrain
from router.placement.revisions import shares_of
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import Account
    from router.decisions import DecisionLog
    from router.fleet.health import Breaker
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.on_demand import OnDemandModels
    from router.operations import RoleChanger
    from router.placement.cost import CostModel
    from router.request import RequestServer
    from router.roles import Loads, Verdict

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound="Callable[..., Any]")


def _aborting(method: Method) -> Method:
    """End the RPC with the PdserveError that `method` raises."""

    @wraps(method)
    async def call(self: object, request: object, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except PdserveError as error:
            await rpc.abort(context, error)

    return cast("Method", call)


class RegistryService(RegistryServicer):
    """Through it workers register, renew their lease and leave."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestServer,
        costs: CostModel,
        on_demand: OnDemandModels | None,
        roles: Mapping[str, Verdict],
        loads: Mapping[str, Loads],
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._costs = costs
        self._on_demand = on_demand
        self._roles = roles
        self._loads = loads

    async def Register(  # noqa: N802
        self, request: w.RegisterRequest, context: Context
    ) -> w.RegisterResponse:
        try:
            info = wire.worker_from_pb(request.worker)
            _check_address(info.address, "worker.address")
            _check_address(info.session_address, "worker.session_address")
            adapters = [wire.adapter_from_pb(x) for x in request.adapters]
            self._fleet.register(info, draining=request.draining, adapters=adapters)
        except InvalidRequest as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        return w.RegisterResponse(lease_s=self._fleet.lease_s)

    @_aborting
    async def Renew(  # noqa: N802
        self, request: w.RenewRequest, context: Context
    ) -> w.RenewResponse:
        worker_id = request.worker_id
        if not self._fleet.renew(
            worker_id,
            request.instance_id,
            load=wire.load_from_pb(request.load) if request.HasField("load") else None,
            draining=request.draining,
            kv=wire.kv_report_from_pb(request.kv) if request.HasField("kv") else None,
            unhealthy=request.unhealthy,
            adapters=[wire.adapter_from_pb(x) for x in request.adapters],
            gpus=request.gpus,
            account=_account(request),
        ):
            unknown = Unavailable(f"worker {worker_id} is not registered")
            await rpc.abort(context, unknown, status=grpc.StatusCode.NOT_FOUND)
        if request.moving or request.draining:
            # A draining worker has time: until it asks, requests move only if that costs nothing.
            reason = f"worker {worker_id} is draining"
            self._requests.move_off(worker_id, reason, live_only=not request.moving)
        return w.RenewResponse(lease_s=self._fleet.lease_s)

    @_aborting
    async def Deregister(  # noqa: N802
        self, request: w.DeregisterRequest, context: Context
    ) -> w.DeregisterResponse:
        account = _account(request)
        self._fleet.deregister(request.worker_id, request.instance_id, account)
        return w.DeregisterResponse()

    async def ListWorkers(  # noqa: N802
        self, request: w.ListWorkersRequest, context: Context
    ) -> w.ListWorkersResponse:
        fleet, now = self._fleet, self._fleet.now()
        return w.ListWorkersResponse(
            workers=[self._entry(member, now) for member in fleet.members.values()],
            topology=fleet.topology,
            roles=[
                w.ModelNote(model=x, text=v.text)
                for x, v in sorted(self._roles.items())
                if x in fleet.models()
            ],
            needs=[
                w.RoleNeed(model=model, role=wire.role_to_pb(role), workers=need)
                for model, needs in sorted(self._needs().items())
                for role, need in needs.items()
            ],
            on_demand=[w.ModelNote(model=x, text=text) for x, text in self._on_demand.texts()]
            if self._on_demand is not None
            else (),
            disaggregation=[
                w.ModelNote(model=x, text=self._costs.disaggregation(x)) for x in fleet.models()
            ],
            ejected_pairs=[
                w.EjectedPair(
                    prefill_worker=prefill, decode_worker=decode, **_breaker_fields(breaker, now)
                )
                for (prefill, decode), breaker in fleet.outliers.listed(now)
            ],
        )

    def _needs(self) -> dict[str, dict[Role, float]]:
        needs = {model: loads.needs for model, loads in self._loads.items()}
        for model, load in () if self._on_demand is None else self._on_demand.loads():
            known = needs.pop(model, {})
            if load is not None:
                both = (Role.PREFILL, Role.DECODE)
                needs[model] = {x: max(load, known.get(x, 0.0)) for x in both}
        return needs

    def _entry(self, member: Member, now: float) -> w.WorkerEntry:
        prefills, breaker = member.info.role is Role.PREFILL, member.breaker
        entry = w.WorkerEntry(
            info=wire.worker_to_pb(member.info),
            load=None if member.load is None else wire.load_to_pb(member.load),
            state=member.state.value,
            outstanding_requests=member.outstanding_requests,
            outstanding_tokens=member.outstanding_tokens if prefills else member.reserved_tokens,
            unhealthy=member.unhealthy,
            adapters=sorted(member.adapters),
        )
        if shares := self._fleet.shares.get(member.info.model.name):
            entry.revision_share = shares.get(member.info.revision, 0.0)
        if breaker.until is not None:
            state = breaker.state(now).value
            entry.breaker.CopyFrom(w.Breaker(state=state, **_breaker_fields(breaker, now)))
        return entry


def _account(request: w.RenewRequest | w.DeregisterRequest) -> Account | None:
    return wire.account_from_pb(request.account) if request.HasField("account") else None


def _check_address(address: str, field: str) -> None:
    """Raises InvalidRequest for what is not host:port."""
    if not is_address(address):
        raise InvalidRequest(f"{field} is {address!r}, which is not host:port", field=field)


def _breaker_fields(breaker: Breaker, now: float) -> dict[str, Any]:
    remaining_s = breaker.remaining_s(now)
    return {"reason": breaker.reason, "remaining_s": remaining_s, "failures": breaker.failures}


class AdminService(AdminServicer):
    def __init__(
        self, log: DecisionLog, fleet: Fleet, roles: RoleChanger, metrics: RouterMetrics
    ) -> None:
        self._log = log
        self._fleet = fleet
        self._roles = roles
        self._metrics = metrics

    async def Explain(  # noqa: N802
        self, request: a.ExplainRequest, context: Context
    ) -> a.ExplainedRequest:
        found = self._log.of(request.request_id)
        if not found:
            text = f"no decision for request {request.request_id} is kept"
            error = InvalidRequest(text, field="request_id")
            await rpc.abort(context, error, status=grpc.StatusCode.NOT_FOUND)
        return explained(found)

    @_aborting
    async def ChangeRole(  # noqa: N802
        self, request: a.ChangeRoleRequest, context: Context
    ) -> a.ChangeRoleResponse:
        role, drain_s = wire.role_from_pb(request.role), request.drain_timeout_s
        return await self._roles.change(request.worker_id, role, drain_timeout_s=drain_s)

    # Responses are written, not yielded: a generator that waits at a yield when its RPC is
    # cancelled is left to the garbage collector.
    @_aborting
    async def DrainWorker(  # type: ignore[override]  # noqa: N802
        self, request: a.DrainWorkerRequest, context: Context
    ) -> None:
        steps = drain(
            self._fleet,
            request.worker_id,
            timeout_s=request.timeout_s,
            force=request.force,
            stop=request.stop,
        )
        async with aclosing(steps):
            async for progress in steps:
                await context.write(progress)

    @_aborting
    async def UndrainWorker(  # noqa: N802
        self, request: a.UndrainWorkerRequest, context: Context
    ) -> a.UndrainWorkerResponse:
        await undrain(self._fleet, request.worker_id)
        return a.UndrainWorkerResponse()

    @_aborting
    async def SetWeights(  # noqa: N802
        self, request: a.SetWeightsRequest, context: Context
    ) -> a.ListRevisionsResponse:
        model, weights = self._model(request.model), dict(request.weights)
        there = {m.info.revision for m in self._fleet.of_model(model) if not m.lost}
        for revision, weight in weights.items():
            if weight > 0 and revision not in there:
                known = ", ".join(map(repr, sorted(there)))
                text = f"no worker of model {model} has revision {revision!r}; there are: {known}"
                raise InvalidRequest(text, field=f"weights.{revision}")
        now = shares_of(weights) if weights else {}
        before = self._fleet.shares.pop(model, {})
        if now:
            self._fleet.shares[model] = now
        self._metrics.keep_revisions(model, weights.keys())
        if now != before:
            logger.info("model %s: shares of revisions are %s", model, now or "none")
        return self._revisions(model)

    @_aborting
    async def ListRevisions(  # noqa: N802
        self, request: a.ListRevisionsRequest, context: Context
    ) -> a.ListRevisionsResponse:
        return self._revisions(self._model(request.model))

    def _model(self, name: str) -> str:
        """Return the first name of a model that generates. Raises InvalidRequest."""
        found = next((x for x in self._fleet.models().values() if name in x.names), None)
        if found is None or not self._fleet.of_model(found.name):
            text = f"no worker generates with a model {name!r}"
            raise InvalidRequest(text, field="model")
        return found.name

    def _revisions(self, model: str) -> a.ListRevisionsResponse:
        shares = self._fleet.shares.get(model, {})
        members = [m for m in self._fleet.of_model(model) if not m.lost]
        ready = Counter(
            (m.info.revision, m.info.role.value) for m in members if m.state is MemberState.READY
        )
        return a.ListRevisionsResponse(
            revisions=[
                a.Revision(
                    name=name,
                    share=shares.get(name, 0.0) if shares else None,
                    ready={role: n for (x, role), n in ready.items() if x == name},
                    counts=self._metrics.of_revision(model, name),
                )
                for name in sorted({*shares, *(m.info.revision for m in members)})
            ]
        )
