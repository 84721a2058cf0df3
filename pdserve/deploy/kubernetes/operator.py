"""Canary rollouts of the pools of a `PDService`.

Two Deployments are the templates of the pools; they are scaled to 0 pods. Each revision of the
templates has a cohort: one Deployment per pool. Each look compares the spec with the existing
cohorts. The state of a canary is in the status of the service, so that another operator can
continue.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pdserve.deploy.kubernetes.api import Deployment, PDService, Pod, call, merge
from pdserve.deploy.local.restarts import error_of
from pdserve.deploy.scaling.canary import CanaryRules, CanaryVerdict, judge
from pdserve.errors import Conflict, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.scaling.weights import RevisionFigures, RouterWeights

    Figures = Mapping[str, RevisionFigures]
    Object = dict[str, Any]
    Counts = list[dict[str, int]]

logger = logging.getLogger(__name__)

POOLS = ("prefill", "decode")
SERVICE, REVISION = "pdserve.dev/service", "pdserve.dev/revision"
# A container with this many restarts is in a crash loop.
_CRASH_LOOP = 2
_MESSAGE_CHARS = 300


class Operator:
    """Reconciles every PDService of a namespace while it holds the lease. `clock` returns Unix
    time, because the times of a canary are stored and outlive the operator. State: the wanted
    revision of each service at the last reconciliation."""

    def __init__(
        self, client: Any, lease: LeaderLease, routers: RouterWeights, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._lease = lease
        self._routers = routers
        self._clock = clock
        self._wanted: dict[str, str] = {}

    async def look(self) -> None:
        """Renew the lease and reconcile each service with its spec. Raises PdserveError; the next
        look continues."""
        if not await self._lease.renew():
            return
        for service in await self._list(PDService):
            status = deepcopy(service.get("status") or {})
            with suppress(Conflict):  # the service has changed since; the next look retries
                await self._reconcile(service, status)
                if status != service.get("status"):
                    version = {"resourceVersion": service["metadata"]["resourceVersion"]}
                    change = {"metadata": version, "status": status}
                    await self._merge(PDService.Status, service, change)

    async def _reconcile(self, service: Object, status: Object) -> None:
        spec, stable = service["spec"], status.get("revision")
        names = {pool: spec[pool]["deployment"] for pool in POOLS}
        templates = {x: (await call(self._client.get(Deployment, names[x]))) for x in POOLS}
        wanted = revision_of(templates)
        figures: Figures = {}
        with suppress(InvalidRequest):  # routers do not know the model before its first worker
            figures = await self._routers.revisions(spec["model"])
        name = service["metadata"]["name"]
        before, self._wanted[name] = self._wanted.get(name), wanted
        is_new = (status.get("canary") or {}).get("revision") != wanted
        # `kubectl apply` writes the two templates one after the other. A new pair of templates may
        # be half of a change, so wait until two looks have seen the same pair.
        is_half = is_new and before != wanted
        if stable is None or wanted in (stable, status.get("rejected")) or is_half:
            await self._settle(service, status, templates, stable or wanted, figures)
            return
        if is_new:
            status["canary"] = {"revision": wanted, "step": -1, "unreadySince": self._clock()}
        await self._advance(service, status, templates, figures)

    async def _settle(
        self, service: Object, status: Object, templates: Object, revision: str, figures: Figures
    ) -> None:
        """Send all requests to the cohort of `revision`, then delete the other cohorts."""
        spec = service["spec"]
        if canary := status.get("canary"):
            self._end_canary(status, "Cancelled", f"revision {canary['revision']}")
        sizes = {pool: spec[pool]["replicas"] for pool in POOLS}
        others = any(found.ready for x, found in figures.items() if x != revision)
        if any(share is not None for found in figures.values() for share in found.shares):
            await self._routers.set_weights(spec["model"], {revision: 1.0} if others else {})
        cohorts = await self._cohorts(service)
        await self._size(service, templates, cohorts, revision, sizes)
        is_ready = await self._tell_ready(status, figures, revision, sizes)
        if is_ready:
            status["revision"] = revision
            await self._delete_others(cohorts, {revision})
            for template in templates.values():
                await self._set_replicas(template, 0)

    async def _advance(
        self, service: Object, status: Object, templates: Object, figures: Figures
    ) -> None:
        """Move a canary to its next state if its conditions are met."""
        spec, canary, stable = service["spec"], status["canary"], status["revision"]
        revision, step, steps = canary["revision"], canary["step"], spec["steps"]
        is_last = step == len(steps)
        sizes = {pool: spec[pool]["replicas" if is_last else "canary"] for pool in POOLS}
        # Set the weights before the canary has workers, so that they get no requests by accident.
        # Set them at each look, because a restarted router has no weights.
        weights = {stable: 100.0}
        if step >= 0 and revision in figures:
            share = float(steps[min(step, len(steps) - 1)])
            weights = {stable: 100.0 - share, revision: share}
        figures = await self._routers.set_weights(spec["model"], weights)
        cohorts = await self._cohorts(service)
        replicas = {pool: spec[pool]["replicas"] for pool in POOLS}
        await self._scale(spec, cohorts, stable, replicas)
        await self._tell_ready(status, figures, stable, replicas)
        await self._size(service, templates, cohorts, revision, sizes)
        await self._delete_others(cohorts, {stable, revision})
        is_ready, text = _readiness(figures, revision, sizes)
        text = f"revision {revision}: {text}"
        if not is_ready:
            canary["unreadySince"] = canary.get("unreadySince") or self._clock()
            waited_s = self._clock() - canary["unreadySince"]
            crashes, trouble = await self._trouble(revision)
            text = f"{text}{trouble}"
            if waited_s > spec["readySeconds"] or crashes:
                self._roll_back(status, f"{text} after {waited_s:.0f} s")
            else:
                self._tell(status, "Canary", True, "WaitsForWorkers", text)
            return
        if "unreadySince" in canary:
            canary["unreadySince"] = None  # a merge patch with null removes the stored field
        counted = [dict(figures[x].counts) for x in (stable, revision)]
        if is_last:
            status["revision"] = revision
            self._end_canary(status, "Promoted", f"revision {revision} after {stable}")
        elif step < 0:
            self._begin_step(status, 0, counted, f"{text}; step 1 of {len(steps)}")
        else:
            self._judge(spec, status, counted)

    def _judge(self, spec: Object, status: Object, counted: Counts) -> None:
        canary, step = status["canary"], status["canary"]["step"]
        old, new = (
            {x: now.get(x, 0) - before.get(x, 0) for x in now | before}
            for now, before in zip(counted, canary["before"], strict=True)
        )
        if min((0, *old.values(), *new.values())) < 0:
            self._begin_step(status, step, counted, "a router restarted, and so does the step")
            return
        rules = CanaryRules(
            spec["stepSeconds"], spec["minRequests"], spec["tolerancePercent"] / 100
        )
        verdict, reason = judge(rules, old, new, self._clock() - canary["since"])
        if verdict is CanaryVerdict.ROLL_BACK:
            self._roll_back(status, reason)
        elif verdict is CanaryVerdict.PROMOTE:
            self._begin_step(status, step + 1, counted, reason)
        else:
            self._tell(status, "Canary", True, "Waits", f"{spec['steps'][step]}%: {reason}")

    def _begin_step(self, status: Object, step: int, counted: Counts, reason: str) -> None:
        status["canary"] |= {"step": step, "since": self._clock(), "before": counted}
        self._tell(status, "Canary", True, "NextStep", reason)

    def _roll_back(self, status: Object, reason: str) -> None:
        status["rejected"] = status["canary"]["revision"]
        self._end_canary(status, "RolledBack", reason)

    def _end_canary(self, status: Object, reason: str, message: str) -> None:
        status["canary"] = None
        self._tell(status, "Canary", False, reason, message)

    async def _tell_ready(
        self, status: Object, figures: Figures, revision: str, sizes: Mapping[str, int]
    ) -> bool:
        """Set the condition with the number of ready workers of a revision. Return True if all are
        ready."""
        is_ready, text = _readiness(figures, revision, sizes)
        if not is_ready:
            _, trouble = await self._trouble(revision)
            text = f"{text}{trouble}"
        self._tell(status, "Ready", is_ready, "Workers", text)
        return is_ready

    async def _trouble(self, revision: str) -> tuple[bool, str]:
        """Return (True if a pod of the revision is in a crash loop, why its pods do not run)."""
        pods = sorted(
            await self._list(Pod, labels={REVISION: revision}), key=lambda pod: pod.metadata.name
        )
        found = [x for pod in pods for x in _troubles(pod)]
        return any(crashes for crashes, _ in found), "".join(f"; {text}" for _, text in found)

    async def _cohorts(self, service: Object) -> list[Object]:
        return await self._list(Deployment, labels={SERVICE: service["metadata"]["name"]})

    async def _scale(
        self, spec: Object, cohorts: list[Object], revision: str, sizes: Mapping[str, int]
    ) -> set[str]:
        """Set the replicas of a revision's cohort. Return the pools without a Deployment."""
        there = {x["metadata"]["name"]: x for x in cohorts}
        names = {pool: f"{spec[pool]['deployment']}-{revision}" for pool in sizes}
        for pool, name in names.items():
            if name in there:
                await self._set_replicas(there[name], sizes[pool])
        return {pool for pool, name in names.items() if name not in there}

    async def _size(
        self,
        service: Object,
        templates: Object,
        cohorts: list[Object],
        revision: str,
        sizes: Mapping[str, int],
    ) -> None:
        """Create the cohort of a revision, or set its replicas. Raises Unavailable if a Deployment
        is missing and its template has changed since."""
        for pool in await self._scale(service["spec"], cohorts, revision, sizes):
            cohort = cohort_of(service, templates[pool], revision, sizes[pool])
            if revision != revision_of(templates):
                name = cohort["metadata"]["name"]
                raise Unavailable(f"Deployment {name} is gone, and its template has changed")
            await call(self._writer().create(Deployment(cohort)))

    async def _delete_others(self, cohorts: list[Object], kept: set[str]) -> None:
        """Delete the cohorts of all revisions except `kept`, such as of a superseded canary."""
        for cohort in cohorts:
            if cohort["metadata"]["labels"][REVISION] not in kept:
                await call(self._writer().delete(Deployment, cohort["metadata"]["name"]))

    async def _set_replicas(self, found: Object, replicas: int) -> None:
        if found["spec"].get("replicas", 1) != replicas:
            await self._merge(Deployment, found, {"spec": {"replicas": replicas}})

    def _tell(self, status: Object, kind: str, holds: bool, reason: str, message: str) -> None:
        """Set a condition of the service, and log a change."""
        conditions = {x["type"]: x for x in status.get("conditions", ())}
        condition = {"type": kind, "status": str(holds), "reason": reason}
        changed = conditions.get(kind, {}).get("lastTransitionTime")
        if not condition.items() <= conditions.get(kind, {}).items():
            changed = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            logger.info("%s: %s: %s", kind, reason, message)
        conditions[kind] = {**condition, "message": message, "lastTransitionTime": changed}
        status["conditions"] = list(conditions.values())

    async def _list(self, kind: Any, labels: Any = None) -> list[Any]:
        async def collect() -> list[Any]:
            return [x async for x in self._client.list(kind, labels=labels)]

        return list(await call(collect()))

    async def _merge(self, kind: Any, found: Object, change: Object) -> None:
        await merge(self._writer(), kind, found["metadata"]["name"], change)

    def _writer(self) -> Any:
        if not self._lease.is_held:
            raise Unavailable("the lease expired before all changes were written")
        return self._client


def revision_of(templates: Mapping[str, Object]) -> str:
    """Return the digest that names the revision of these Deployments' pod templates."""
    pods = [templates[pool]["spec"]["template"] for pool in POOLS]
    return hashlib.sha256(json.dumps(pods, sort_keys=True).encode()).hexdigest()[:8]


def cohort_of(service: Object, template: Object, revision: str, replicas: int) -> Object:
    """Return the Deployment of one pool of a cohort."""
    spec, owner = deepcopy(template["spec"]), service["metadata"]
    spec["replicas"] = replicas
    spec["selector"]["matchLabels"][REVISION] = revision
    spec["template"]["metadata"]["labels"][REVISION] = revision
    args = spec["template"]["spec"]["containers"][0].setdefault("args", [])
    args.append(f"--set=worker.revision={revision}")
    version, kind = service["apiVersion"], service["kind"]
    reference = {"apiVersion": version, "kind": kind, "name": owner["name"], "uid": owner["uid"]}
    metadata = {
        "name": f"{template['metadata']['name']}-{revision}",
        "labels": {SERVICE: owner["name"], REVISION: revision},
        "ownerReferences": [{**reference, "controller": True}],
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _readiness(figures: Figures, revision: str, sizes: Mapping[str, int]) -> tuple[bool, str]:
    """Return (True if every router has `sizes` ready workers of the revision, the counts as
    text)."""
    ready = figures[revision].ready if revision in figures else {}
    text = ", ".join(f"{ready.get(role, 0)} of {n} {role} workers" for role, n in sizes.items())
    return all(ready.get(role, 0) >= n for role, n in sizes.items()), f"{text} are ready"


def _troubles(pod: Any) -> list[tuple[bool, str]]:
    """Return (True if in a crash loop, reason) for each container that is not running, and for a
    pod that cannot be scheduled."""
    name, status, found = pod.metadata.name, pod.status, []
    for container in (status and status.containerStatuses) or ():
        waiting = container.state and container.state.waiting
        if waiting is None or waiting.reason == "ContainerCreating":
            continue
        ended = container.lastState and container.lastState.terminated
        error = error_of((ended and ended.message) or waiting.message or "")
        crashes = waiting.reason == "CrashLoopBackOff" and container.restartCount >= _CRASH_LOOP
        text = f"{name}: {waiting.reason}, {container.restartCount} restarts"
        found.append((crashes, ": ".join(filter(None, (text, error)))[:_MESSAGE_CHARS]))
    found.extend(
        (False, f"{name}: {condition.message}"[:_MESSAGE_CHARS])
        for condition in (status and status.conditions) or ()
        if condition.type == "PodScheduled" and condition.status == "False"
    )
    return found
