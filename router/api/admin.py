"""The gRPC services `Registry`, for workers, and `Admin`, for operators."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from pdserve import wire
from pdserve.config import is_address
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminServicer
from pdserve.v1.worker_pb2_grpc import RegistryServicer
from router.fleet.accounting import WORKER_LOST
from router.placement.decisions import explained
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import Account
    from router.fleet.accounting import Accounting
    from router.fleet.health import Breaker
    from router.fleet.member import Member
    from router.fleet.on_demand import OnDemandModels
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.operations.adapters import ServedAdapters
    from router.operations.autoscaler import Loads, Verdict
    from router.operations.drain import Drainer, RoleChanger
    from router.placement.cost import CostModel
    from router.placement.decisions import DecisionLog
    from router.placement.revisions import RevisionShares
    from router.request.request import RequestServer

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

_MAX_CRASH_LOOPS = 1024  # in one report

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
    """Registers workers, renews their leases and deregisters them."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestServer,
        *,
        accounting: Accounting,
        adapters: ServedAdapters,
        shares: RevisionShares,
        costs: CostModel,
        on_demand: OnDemandModels | None,
        roles: Mapping[str, Verdict],
        loads: Mapping[str, Loads],
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._accounting = accounting
        self._adapters = adapters
        self._shares = shares
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
            died = self._fleet.register(info, draining=request.draining, adapters=adapters)
        except InvalidRequest as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)
        if died is not None:
            self._accounting.wasted(died.info, WORKER_LOST, died.open_s)
        members = self._fleet.members
        self._adapters.report(members[info.worker_id], members.values())
        return w.RegisterResponse(lease_s=self._fleet.lease_s)

    @_aborting
    async def Renew(  # noqa: N802
        self, request: w.RenewRequest, context: Context
    ) -> w.RenewResponse:
        worker_id, account = request.worker_id, _account(request)
        member = self._fleet.renew(
            worker_id,
            request.instance_id,
            load=wire.load_from_pb(request.load) if request.HasField("load") else None,
            draining=request.draining,
            kv=wire.kv_report_from_pb(request.kv) if request.HasField("kv") else None,
            unhealthy=request.unhealthy,
            adapters=[wire.adapter_from_pb(x) for x in request.adapters],
            gpus=request.gpus,
            account=account,
        )
        if member is None:
            unknown = Unavailable(f"worker {worker_id} is not registered")
            await rpc.abort(context, unknown, status=grpc.StatusCode.NOT_FOUND)
        if account is not None:
            self._accounting.reported(member.info, account)
        self._adapters.report(member, self._fleet.members.values())
        if request.moving or request.draining:
            # A draining worker can wait. Until it sets `moving`, move only requests whose KV can
            # be sent along: any other move computes the prompt again.
            reason = f"worker {worker_id} is draining"
            self._requests.move_off(worker_id, reason, live_only=not request.moving)
        return w.RenewResponse(lease_s=self._fleet.lease_s)

    @_aborting
    async def Deregister(  # noqa: N802
        self, request: w.DeregisterRequest, context: Context
    ) -> w.DeregisterResponse:
        member = self._fleet.deregister(
            request.worker_id, request.instance_id, failure=request.failure
        )
        if member is not None and (account := _account(request)) is not None:
            self._accounting.reported(member.info, account)
        return w.DeregisterResponse()

    async def ListWorkers(  # noqa: N802
        self, request: w.ListWorkersRequest, context: Context
    ) -> w.ListWorkersResponse:
        fleet, now = self._fleet, self._fleet.now()
        return w.ListWorkersResponse(
            workers=[self._entry(member, now) for member in fleet.shown().values()],
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

    @_aborting
    async def ReportCrashLoops(  # noqa: N802
        self, request: w.ReportCrashLoopsRequest, context: Context
    ) -> w.ReportCrashLoopsResponse:
        if len(request.workers) > _MAX_CRASH_LOOPS:
            raise InvalidRequest(f"more than {_MAX_CRASH_LOOPS} workers", field="workers")
        for x in request.workers:
            role = wire.role_from_pb(x.role)
            self._fleet.report_crash_loop(x.worker_id, role, x.model, x.reason)
        return w.ReportCrashLoopsResponse()

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
        report, placed = member.reported, member.placed
        reserved_tokens = placed.reserved_blocks * member.info.block_size
        entry = w.WorkerEntry(
            info=wire.worker_to_pb(member.info),
            load=None if report.load is None else wire.load_to_pb(report.load),
            state=member.state.value,
            outstanding_requests=placed.outstanding_requests,
            outstanding_tokens=placed.outstanding_tokens if prefills else reserved_tokens,
            unhealthy=report.unhealthy,
            adapters=sorted(report.adapters),
        )
        if shares := self._shares.by_model.get(member.info.model.name):
            entry.revision_share = shares.get(member.info.revision, 0.0)
        if breaker.until is not None:
            state = breaker.state(now).value
            entry.breaker.CopyFrom(w.Breaker(state=state, **_breaker_fields(breaker, now)))
        return entry


def _account(request: w.RenewRequest | w.DeregisterRequest) -> Account | None:
    return wire.account_from_pb(request.account) if request.HasField("account") else None


def _check_address(address: str, field: str) -> None:
    """Raise InvalidRequest unless `address` is host:port."""
    if not is_address(address):
        raise InvalidRequest(f"{field} is {address!r}, which is not host:port", field=field)


def _breaker_fields(breaker: Breaker, now: float) -> dict[str, Any]:
    remaining_s = breaker.remaining_s(now)
    return {"reason": breaker.reason, "remaining_s": remaining_s, "failures": breaker.failures}


class AdminService(AdminServicer):
    """Explains placements, drains workers, changes roles and sets revision weights."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        log: DecisionLog,
        drainer: Drainer,
        shares: RevisionShares,
        roles: RoleChanger,
        metrics: RouterMetrics,
    ) -> None:
        self._log = log
        self._fleet, self._drainer, self._shares = fleet, drainer, shares
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

    # Responses are written, not yielded: if an RPC is cancelled, grpc leaves a generator that is
    # suspended at a yield to the garbage collector, which would close `steps` late.
    @_aborting
    async def DrainWorker(  # type: ignore[override]  # noqa: N802
        self, request: a.DrainWorkerRequest, context: Context
    ) -> None:
        steps = self._drainer.drain(
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
        await self._drainer.undrain(request.worker_id)
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
        changed = self._shares.set(model, weights)
        self._metrics.keep_revisions(model, weights.keys())
        if changed:
            now = self._shares.by_model.get(model) or "none"
            logger.info("model %s: shares of revisions are %s", model, now)
        return self._revisions(model)

    @_aborting
    async def ListRevisions(  # noqa: N802
        self, request: a.ListRevisionsRequest, context: Context
    ) -> a.ListRevisionsResponse:
        return self._revisions(self._model(request.model))

    def _model(self, name: str) -> str:
        """Return the first name of a generative model; `name` may be an alias. Raises
        InvalidRequest."""
        found = next((x for x in self._fleet.models().values() if name in x.names), None)
        if found is None or not self._fleet.of_model(found.name):
            text = f"no worker generates with a model {name!r}"
            raise InvalidRequest(text, field="model")
        return found.name

    def _revisions(self, model: str) -> a.ListRevisionsResponse:
        shares = self._shares.by_model.get(model) or {}
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
