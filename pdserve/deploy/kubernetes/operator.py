"""Rolls out the pools of a `PDService` by canary.

Two Deployments are templates of the pools; they end without pods. Each revision of them has a
cohort: a Deployment a pool. A look compares what is wanted with what is there. What it has to know
of earlier looks is in the status of the service, so that another operator can go on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from copy import deepcopy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pdserve.deploy.canary import CanaryRules, Verdict, judge
from pdserve.deploy.kubernetes.api import Deployment, PDService, call, merge
from pdserve.errors import Conflict, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.revisions import RevisionFigures, RouterWeights

    Figures = Mapping[str, RevisionFigures]
    Object = dict[str, Any]
    Counts = list[dict[str, int]]

logger = logging.getLogger(__name__)

POOLS = ("prefill", "decode")
SERVICE, REVISION = "pdserve.dev/service", "pdserve.dev/revision"


class Operator:
    """Looks after every PDService of a namespace while it holds the lease. `clock` gives Unix time:
    the times of a canary outlive the operator."""

    def __init__(
        self, client: Any, lease: LeaderLease, routers: RouterWeights, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._lease = lease
        self._routers = routers
        self._clock = clock

    async def look(self) -> None:
        """Renew the lease, and bring each service nearer to its spec. Raises PdserveError; the next
        look goes on."""
        if not await self._lease.renew():
            return
        for service in await self._list(PDService):
            status = deepcopy(service.get("status") or {})
            with suppress(Conflict):  # somebody changed it meanwhile
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
        with suppress(InvalidRequest):  # the first workers are to be made
            figures = await self._routers.revisions(spec["model"])
        if stable is None or wanted in (stable, status.get("rejected")):
            await self._settle(service, status, templates, stable or wanted, figures)
            return
        if (status.get("canary") or {}).get("revision") != wanted:
            status["canary"] = {"revision": wanted, "step": -1, "unreadySince": self._clock()}
        await self._advance(service, status, templates, figures)

    async def _settle(
        self, service: Object, status: Object, templates: Object, revision: str, figures: Figures
    ) -> None:
        """Leave one cohort with all requests, and then nothing of others."""
        spec = service["spec"]
        if canary := status.get("canary"):
            self._end_canary(status, "Cancelled", f"revision {canary['revision']}")
        sizes = {pool: spec[pool]["replicas"] for pool in POOLS}
        others = any(found.ready for x, found in figures.items() if x != revision)
        if any(share is not None for found in figures.values() for share in found.shares):
            await self._routers.set_weights(spec["model"], {revision: 1.0} if others else {})
        cohorts = await self._size(service, templates, revision, sizes)
        is_ready, text = _readiness(figures, revision, sizes)
        self._tell(status, "Ready", is_ready, "Workers", text)
        if is_ready:
            status["revision"] = revision
            for cohort in cohorts:
                if cohort["metadata"]["labels"][REVISION] != revision:
                    name = cohort["metadata"]["name"]
                    await call(self._writer().delete(Deployment, name))
            for template in templates.values():
                await self._set_replicas(template, 0)

    async def _advance(
        self, service: Object, status: Object, templates: Object, figures: Figures
    ) -> None:
        """Bring a canary to its next state if it is time."""
        spec, canary, stable = service["spec"], status["canary"], status["revision"]
        revision, step, steps = canary["revision"], canary["step"], spec["steps"]
        is_last = step == len(steps)
        sizes = {pool: spec[pool]["replicas" if is_last else "canary"] for pool in POOLS}
        # Before there is a worker of the canary, so that it gets no request by accident; and again
        # at each look, because a router that restarted has no weights.
        weights = {stable: 100.0}
        if step >= 0 and revision in figures:
            share = float(steps[min(step, len(steps) - 1)])
            weights = {stable: 100.0 - share, revision: share}
        figures = await self._routers.set_weights(spec["model"], weights)
        await self._size(service, templates, revision, sizes)
        is_ready, text = _readiness(figures, revision, sizes)
        text = f"revision {revision}: {text}"
        if not is_ready:
            canary["unreadySince"] = canary.get("unreadySince") or self._clock()
            waited_s = self._clock() - canary["unreadySince"]
            if waited_s > spec["readySeconds"]:
                self._roll_back(status, f"{text} after {waited_s:.0f} s")
            else:
                self._tell(status, "Canary", True, "WaitsForWorkers", text)
            return
        if "unreadySince" in canary:
            canary["unreadySince"] = None  # which takes it out of the stored status
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
        if verdict is Verdict.ROLL_BACK:
            self._roll_back(status, reason)
        elif verdict is Verdict.PROMOTE:
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

    async def _size(
        self, service: Object, templates: Object, revision: str, sizes: Mapping[str, int]
    ) -> list[Object]:
        """Make the cohort of a revision, or set its replicas. Return all cohorts of the service."""
        cohorts = await self._list(Deployment, labels={SERVICE: service["metadata"]["name"]})
        there = {x["metadata"]["name"]: x for x in cohorts}
        for pool, replicas in sizes.items():
            cohort = cohort_of(service, templates[pool], revision, replicas)
            name = cohort["metadata"]["name"]
            if name in there:
                await self._set_replicas(there[name], replicas)
            elif revision == revision_of(templates):
                await call(self._writer().create(Deployment(cohort)))
            else:
                raise Unavailable(f"Deployment {name} is gone, and its template has changed")
        return cohorts

    async def _set_replicas(self, found: Object, replicas: int) -> None:
        if found["spec"].get("replicas", 1) != replicas:
            await self._merge(Deployment, found, {"spec": {"replicas": replicas}})

    def _tell(self, status: Object, kind: str, holds: bool, reason: str, message: str) -> None:
        """Set a condition."""
        conditions = {x["type"]: x for x in status.get("conditions", ())}
        told = {"type": kind, "status": str(holds), "reason": reason}
        changed = conditions.get(kind, {}).get("lastTransitionTime")
        if not told.items() <= conditions.get(kind, {}).items():
            changed = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            logger.info("%s: %s: %s", kind, reason, message)
        conditions[kind] = {**told, "message": message, "lastTransitionTime": changed}
        status["conditions"] = list(conditions.values())

    async def _list(self, kind: Any, labels: Any = None) -> list[Object]:
        async def collect() -> list[Object]:
            return [x async for x in self._client.list(kind, labels=labels)]

        return list(await call(collect()))

    async def _merge(self, kind: Any, found: Object, change: Object) -> None:
        await merge(self._writer(), kind, found["metadata"]["name"], change)

    def _writer(self) -> Any:
        if not self._lease.is_held:
            raise Unavailable("the lease ended before all was written")
        return self._client


def revision_of(templates: Mapping[str, Object]) -> str:
    """Return a name for the pods of these Deployments: equal for equal ones."""
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
    """Return if every router has as many ready workers of a revision, and how many there are."""
    ready = figures[revision].ready if revision in figures else {}
    text = ", ".join(f"{ready.get(role, 0)} of {n} {role} workers" for role, n in sizes.items())
    return all(ready.get(role, 0) >= n for role, n in sizes.items()), f"{text} are ready"
