"""The gRPC services `Registry`, for workers, and `Admin`, for operators."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import aclosing
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from msgspec import structs

from pdserve import wire
from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.net import rpc
from pdserve.types import Role
from pdserve.v1 import admin_pb2 as a
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.admin_pb2_grpc import AdminServicer
from pdserve.v1.worker_pb2_grpc import RegistryServicer
from router.api.audit import rpc_caller
from router.fleet.view import pair_views, worker_views
from router.placement.decisions import explained
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.observe.audit import AuditLog
    from pdserve.observe.capsules import CapsuleHeader
    from router.control.audits import Auditor
    from router.control.autoscaler import Autoscaler
    from router.control.leases import WorkerLeases
    from router.control.open import WorkerControl
    from router.fleet.view import WorkerView
    from router.request_path import RequestPath

    Context = grpc.aio.ServicerContext[Any, Any]


logger = logging.getLogger(__name__)

_MAX_CRASH_LOOPS = 1024  # per report

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
        path: RequestPath,
        autoscaler: Autoscaler,
        leases: WorkerLeases,
        tool_remarks: Callable[[], list[tuple[str, str]]],
        auditor: Auditor | None = None,
    ) -> None:
        """`tool_remarks` returns models and why their tool calls are limited."""
        self._path, self._autoscaler, self._leases = path, autoscaler, leases
        self._fleet = path.workers.fleet
        self._tool_remarks, self._auditor = tool_remarks, auditor

    async def Register(  # noqa: N802
        self, request: w.RegisterRequest, context: Context
    ) -> w.RegisterResponse:
        try:
            return self._leases.register(request)
        except InvalidRequest as error:
            await rpc.abort(context, error, status=grpc.StatusCode.FAILED_PRECONDITION)

    @_aborting
    async def Renew(  # noqa: N802
        self, request: w.RenewRequest, context: Context
    ) -> w.RenewResponse:
        renewed = self._leases.renew(request)
        if renewed is None:
            unknown = Unavailable(f"worker {request.worker_id} is not registered")
            await rpc.abort(context, unknown, status=grpc.StatusCode.NOT_FOUND)
        return renewed

    @_aborting
    async def Deregister(  # noqa: N802
        self, request: w.DeregisterRequest, context: Context
    ) -> w.DeregisterResponse:
        self._leases.deregister(request)
        return w.DeregisterResponse()

    async def ListWorkers(  # noqa: N802
        self, request: w.ListWorkersRequest, context: Context
    ) -> w.ListWorkersResponse:
        fleet = self._fleet
        return w.ListWorkersResponse(
            workers=[self._entry(view) for view in worker_views(fleet)],
            topology=fleet.topology,
            draining=self._path.peers.draining,
            peers=[
                w.PeerEntry(
                    region=x.region,
                    address=x.address,
                    reason=x.reason,
                    delay_s=x.delay_s,
                    models=[name for name, load in sorted(x.models.items()) if load.workers],
                )
                for x in self._path.peers.views()
            ],
            roles=[
                w.ModelNote(model=x, text=v.text)
                for x, v in sorted(self._autoscaler.targets.items())
                if x in fleet.models()
            ],
            needs=[
                w.RoleNeed(model=model, role=wire.role_to_pb(role), workers=need)
                for model, needs in sorted(self._needs().items())
                for role, need in needs.items()
            ],
            on_demand=[w.ModelNote(model=x, text=text) for x, text in self._path.on_demand.texts()]
            if self._path.on_demand is not None
            else (),
            audits=[w.ModelNote(model=x, text=text) for x, text in self._auditor.texts()]
            if self._auditor is not None
            else (),
            tools=[w.ModelNote(model=x, text=text) for x, text in self._tool_remarks()],
            disaggregation=[
                w.ModelNote(model=x, text=self._path.costs.disaggregation(x))
                for x in fleet.models()
            ],
            ejected_pairs=[
                w.EjectedPair(
                    prefill_worker=pair.prefill,
                    decode_worker=pair.decode,
                    reason=pair.breaker.reason,
                    remaining_s=pair.breaker.remaining_s,
                    failures=pair.breaker.failures,
                )
                for pair in pair_views(fleet)
                if pair.is_ejected
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
        needs = {model: loads.needs for model, loads in self._autoscaler.loads.items()}
        for model, load in () if self._path.on_demand is None else self._path.on_demand.loads():
            known = needs.pop(model, {})
            if load is not None:
                both = (Role.PREFILL, Role.DECODE)
                needs[model] = {x: max(load, known.get(x, 0.0)) for x in both}
        return needs

    def _entry(self, view: WorkerView) -> w.WorkerEntry:
        entry = w.WorkerEntry(
            info=wire.worker_to_pb(view.info),
            load=None if view.load is None else wire.load_to_pb(view.load),
            state=view.state.value,
            reason=view.reason,
            outstanding_requests=view.placed_requests,
            outstanding_tokens=view.placed_tokens,
            unhealthy=view.unhealthy,
            adapters=view.adapters,
            weights_version=view.weights,
            breaker=None if view.breaker is None else w.Breaker(**structs.asdict(view.breaker)),
        )
        if shares := self._path.shares.by_model.get(view.info.model.name):
            entry.revision_share = shares.get(view.info.revision, 0.0)
        return entry


def capsule_entry(header: CapsuleHeader, size: int) -> a.CapsuleEntry:
    return a.CapsuleEntry(
        request_id=header.request_id,
        tenant=header.tenant,
        model=header.model,
        reason=header.reason,
        code=header.code,
        unix_time_s=header.created,
        region=header.region,
        size=size,
        key=header.key,
    )


class AdminService(AdminServicer):
    """Explains placements, drains workers, changes roles, weights, and shares of revisions."""

    def __init__(self, path: RequestPath, control: WorkerControl, audit: AuditLog) -> None:
        self._fleet, self._shares, self._metrics = path.workers.fleet, path.shares, path.metrics
        self._decisions, self._audit = path.decisions, audit
        self._verdicts = path.guards.verdicts
        self._drainer, self._roles = control.drainer, control.changer
        self._router_drainer = control.router_drainer
        self._weights, self._capsules = control.weights, path.capsules

    async def Explain(  # noqa: N802
        self, request: a.ExplainRequest, context: Context
    ) -> a.ExplainedRequest:
        found = self._decisions.of(request.request_id)
        verdicts = self._verdicts.of(request.request_id)
        if not (found or verdicts):
            text = f"no decision for request {request.request_id} is kept"
            error = InvalidRequest(text, field="request_id")
            await rpc.abort(context, error, status=grpc.StatusCode.NOT_FOUND)
        explanation = explained(found, self._decisions.chosen.of(request.request_id))
        explanation.request_id = explanation.request_id or request.request_id
        explanation.guards.extend([a.GuardVerdict(**structs.asdict(x)) for x in verdicts])
        return explanation

    async def ListCapsules(  # noqa: N802
        self, request: a.ListCapsulesRequest, context: Context
    ) -> a.ListCapsulesResponse:
        found = [
            capsule_entry(x.header, x.size)
            for x in await self._capsules.listed()
            if request.tenant in ("", x.header.tenant) and request.model in ("", x.header.model)
        ]
        return a.ListCapsulesResponse(capsules=found)

    @_aborting
    async def GetCapsule(  # noqa: N802
        self, request: a.GetCapsuleRequest, context: Context
    ) -> a.GetCapsuleResponse:
        request_id = request.request_id
        with self._audit.action(rpc_caller(context), "capsule", request_id=request_id):
            header, content = await self._capsules.get(request_id)
        entry = capsule_entry(header, len(content))
        return a.GetCapsuleResponse(capsule=entry, content=content)

    @_aborting
    async def ChangeRole(  # noqa: N802
        self, request: a.ChangeRoleRequest, context: Context
    ) -> a.ChangeRoleResponse:
        role, drain_s = wire.role_from_pb(request.role), request.drain_timeout_s
        worker_id = request.worker_id
        with self._audit.action(rpc_caller(context), "role", worker=worker_id, role=role) as line:
            changed = await self._roles.change(worker_id, role, drain_timeout_s=drain_s)
            line["result"] = changed.failure or "ok"
            return changed

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
        details = {"worker": request.worker_id, "force": request.force, "stop": request.stop}
        with self._audit.action(rpc_caller(context), "drain", **details):
            async with aclosing(steps):
                async for progress in steps:
                    await context.write(progress)

    @_aborting
    async def UndrainWorker(  # noqa: N802
        self, request: a.UndrainWorkerRequest, context: Context
    ) -> a.UndrainWorkerResponse:
        with self._audit.action(rpc_caller(context), "undrain", worker=request.worker_id):
            await self._drainer.undrain(request.worker_id)
        return a.UndrainWorkerResponse()

    @_aborting
    async def DrainRouter(  # type: ignore[override]  # noqa: N802 - see DrainWorker
        self, request: a.DrainRouterRequest, context: Context
    ) -> None:
        steps = self._router_drainer.drain(timeout_s=request.timeout_s, force=request.force)
        with self._audit.action(rpc_caller(context), "drain-router", force=request.force):
            async with aclosing(steps):
                async for progress in steps:
                    await context.write(progress)

    @_aborting
    async def UndrainRouter(  # noqa: N802
        self, request: a.UndrainRouterRequest, context: Context
    ) -> a.UndrainRouterResponse:
        with self._audit.action(rpc_caller(context), "undrain-router"):
            self._router_drainer.undrain()
        return a.UndrainRouterResponse()

    @_aborting
    async def SetWeights(  # noqa: N802
        self, request: a.SetWeightsRequest, context: Context
    ) -> a.ListRevisionsResponse:
        weights = dict(request.weights)
        with self._audit.action(
            rpc_caller(context), "weights", model=request.model, weights=weights
        ):
            model = self._model(request.model)
            self._set_weights(model, weights)
        return self._revisions(model)

    def _set_weights(self, model: str, weights: Mapping[str, float]) -> None:
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

    @_aborting
    async def ListRevisions(  # noqa: N802
        self, request: a.ListRevisionsRequest, context: Context
    ) -> a.ListRevisionsResponse:
        return self._revisions(self._model(request.model))

    @_aborting
    async def UpdateCheckpoint(  # noqa: N802
        self, request: a.UpdateCheckpointRequest, context: Context
    ) -> a.CheckpointStatus:
        model = self._weights.model_named(request.model)
        details = {"model": model, "path": request.path, "version": request.version}
        with self._audit.action(rpc_caller(context), "update_weights", **details):
            await self._weights.update(
                model, request.path, request.version, request.mode, request.timeout_s
            )
        return self._checkpoint(model)

    @_aborting
    async def PauseModel(  # noqa: N802
        self, request: a.PauseModelRequest, context: Context
    ) -> a.CheckpointStatus:
        model = self._weights.model_named(request.model)
        with self._audit.action(rpc_caller(context), "pause", model=model, mode=request.mode):
            await self._weights.pause(model, request.mode, request.timeout_s)
        return self._checkpoint(model)

    @_aborting
    async def ResumeModel(  # noqa: N802
        self, request: a.ResumeModelRequest, context: Context
    ) -> a.CheckpointStatus:
        model = self._weights.model_named(request.model)
        with self._audit.action(rpc_caller(context), "resume", model=model):
            await self._weights.resume(model)
        return self._checkpoint(model)

    @_aborting
    async def GetCheckpoint(  # noqa: N802
        self, request: a.GetCheckpointRequest, context: Context
    ) -> a.CheckpointStatus:
        return self._checkpoint(self._weights.model_named(request.model))

    def _checkpoint(self, model: str) -> a.CheckpointStatus:
        change = self._weights.open_change(model)
        members = self._fleet.of_model(model, tuple(Role))
        return a.CheckpointStatus(
            model=model,
            weights=wire.weights_to_pb(self._fleet.weights_of(model)),
            phase="" if change is None else change.phase,
            phase_s=0.0 if change is None else change.seconds,
            laggards=self._weights.laggards(model),
            updating={m.worker_id: m.reported.updating for m in members if m.reported.updating},
        )

    def _model(self, name: str) -> str:
        """Return the first name of a generative model. `name` may be an alias. Raises
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
