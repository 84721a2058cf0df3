"""Canary rollouts of a PDService, on an API server in memory, with routers and a clock that the
tests move."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import AsyncExitStack, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.deploy.scaling.weights import RevisionFigures
from pdserve.errors import InvalidRequest, Unavailable
from tests.support.kubernetes_api import KubernetesApi, add_service, change_image, kubernetes_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

pytest.importorskip("lightkube", reason="needs the extra kubernetes")
from pdserve.deploy.kubernetes.api import connect
from pdserve.deploy.kubernetes.lease import LeaderLease
from pdserve.deploy.kubernetes.operator import REVISION, Operator

STEPS = [5, 50]
SPEC: dict[str, Any] = {
    "prefill": {"deployment": "pdserve-prefill", "replicas": 2, "canary": 1},
    "decode": {"deployment": "pdserve-decode", "replicas": 3, "canary": 1},
    "steps": STEPS,
    "readySeconds": 600,
}


class Setup:
    """A cluster whose pods are ready at once, unless their revision is `broken`, and its routers.
    `traffic` are the requests, and the failed ones, that a revision gets at each look while it has
    a share of them."""

    def __init__(self, api: KubernetesApi, stack: AsyncExitStack) -> None:
        self.api = api
        self.now = 1_800_000_000.0
        self.broken: set[str] = set()
        self.weights: dict[str, float] = {}
        self.counts: dict[str, Counter[str]] = {}
        self.traffic: dict[str, tuple[int, int]] = {}
        self.seen: list[dict[str, float]] = []
        self._stack = stack

    async def start(self) -> Operator:
        client = await self._stack.enter_async_context(connect())
        lease = LeaderLease(client, "pdserve-operator", lambda: self.now)
        return Operator(client, lease, self, lambda: self.now)

    # The routers.

    async def revisions(self, model: str) -> dict[str, RevisionFigures]:
        assert model == "demo"
        found: dict[str, RevisionFigures] = {x: self._figures(x) for x in self.weights}
        for cohort in self.api.listed("deployments", {}):
            revision = cohort["metadata"].get("labels", {}).get(REVISION, "")
            if cohort["spec"]["replicas"] and revision not in self.broken:
                role = cohort["metadata"]["name"].split("-")[1]
                ready = found.setdefault(revision, self._figures(revision)).ready
                ready[role] = cohort["spec"]["replicas"]
        if not found:
            raise InvalidRequest("no worker generates with a model 'demo'", field="model")
        total = sum(self.weights.values())
        for name, figures in found.items():
            figures.shares = [self.weights.get(name, 0.0) / total if total else None]
        return found

    async def set_weights(
        self, model: str, weights: Mapping[str, float]
    ) -> dict[str, RevisionFigures]:
        self.weights = dict(weights)
        self.seen.append(self.weights)
        return await self.revisions(model)

    def _figures(self, revision: str) -> RevisionFigures:
        return RevisionFigures(counts=Counter(self.counts.get(revision, {})))

    # What happens.

    def status(self) -> Any:
        return deepcopy(self.api.objects["pdservices", "demo"].get("status", {}))

    def canary(self) -> tuple[str, str]:
        """Return the reason and the message of the condition."""
        found = {x["type"]: x for x in self.status()["conditions"]}
        return found["Canary"]["reason"], found["Canary"]["message"]

    def cohorts(self) -> dict[str, int]:
        """Return the replicas of each Deployment that has some."""
        found = self.api.listed("deployments", {})
        return {x["metadata"]["name"]: n for x in found if (n := x["spec"]["replicas"])}

    async def look(self, operator: Operator, times: int = 1) -> None:
        for _ in range(times):
            self.now += 5.0
            for revision, weight in self.weights.items():
                if weight:
                    requests, failed = self.traffic.get(revision, (5, 0))
                    counts = self.counts.setdefault(revision, Counter())
                    counts.update(ended=requests, failed=failed)
            await operator.look()


@pytest.fixture
async def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        api, config = await stack.enter_async_context(kubernetes_api(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(config))
        add_service(api, **SPEC)
        yield Setup(api, stack)


async def installed(setup: Setup) -> tuple[Operator, str]:
    """Roll out the first cohort. Return its revision."""
    operator = await setup.start()
    await setup.look(operator, 3)
    revision = setup.status()["revision"]
    assert setup.cohorts() == {
        f"pdserve-prefill-{revision}": 2,
        f"pdserve-decode-{revision}": 3,
    }
    return operator, revision


async def test_the_first_cohort_takes_over_from_the_pods_of_the_templates(setup: Setup) -> None:
    _, revision = await installed(setup)
    assert setup.seen == []  # one pool: nothing was split
    cohort = setup.api.objects["deployments", f"pdserve-decode-{revision}"]
    assert cohort["spec"]["selector"]["matchLabels"][REVISION] == revision
    assert cohort["spec"]["template"]["metadata"]["labels"][REVISION] == revision
    (container,) = cohort["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["worker", f"--set=worker.revision={revision}"]
    (owner,) = cohort["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("PDService", "u1", True)


async def test_a_good_canary_gets_more_and_more_and_replaces_the_old_cohort(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 2)
    # No worker of the canary is made before routers keep new requests from it.
    assert setup.seen == [{old: 100.0}]
    assert len(setup.cohorts()) == 4
    await setup.look(operator, 20)
    new = setup.status()["revision"]
    assert new != old
    assert setup.cohorts() == {f"pdserve-prefill-{new}": 2, f"pdserve-decode-{new}": 3}
    # At last one pool again, once the old pods are gone.
    seen = [x for x, _ in itertools.groupby(setup.seen)]
    steps = [{old: 100.0 - x, new: float(x)} for x in STEPS]
    assert seen == [{old: 100.0}, *steps, {new: 1.0}, {}]
    assert setup.canary() == ("Promoted", f"revision {new} after {old}")


async def test_a_bad_canary_goes_back_and_is_not_tried_again(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 3)
    new = setup.status()["canary"]["revision"]
    setup.traffic[new] = (5, 3)
    await setup.look(operator, 20)
    assert setup.status()["revision"] == old
    assert setup.canary()[0] == "RolledBack"
    assert "requests failed, and 0 of" in setup.canary()[1]
    assert setup.cohorts() == {f"pdserve-prefill-{old}": 2, f"pdserve-decode-{old}": 3}
    assert setup.weights == {}
    change_image(setup.api, "v3")
    await setup.look(operator, 20)
    assert setup.status()["revision"] not in (old, new)


async def test_a_canary_without_ready_workers_goes_back(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 2)
    setup.broken.add(setup.status()["canary"]["revision"])
    await setup.look(operator, 2)
    assert setup.canary()[0] == "WaitsForWorkers"
    # Workers that come and go again have as long as at first.
    broken = setup.broken.pop()
    setup.now += SPEC["readySeconds"] - 10
    await setup.look(operator)
    setup.broken.add(broken)
    await setup.look(operator, 2)
    assert setup.canary()[0] == "WaitsForWorkers"
    setup.now += SPEC["readySeconds"]
    await setup.look(operator, 3)
    assert setup.canary()[0] == "RolledBack"
    assert "0 of 1 prefill workers, 0 of 1 decode workers are ready after" in setup.canary()[1]
    assert all(old in name for name in setup.cohorts())


async def test_a_restarted_operator_and_restarted_routers_go_on_with_the_step(
    setup: Setup,
) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 5)
    before = setup.status()["canary"]
    assert before["step"] == 0
    second = await setup.start()
    await setup.look(second, 3)  # its lease has not ended: the other may still lead
    assert setup.status()["canary"] == before
    setup.weights.clear()
    setup.counts.clear()
    await setup.look(second, 1)
    assert setup.weights == {old: 95.0, before["revision"]: 5.0}
    assert setup.canary() == ("NextStep", "a router restarted, and so does the step")
    assert setup.status()["canary"]["since"] > before["since"]
    await setup.look(second, 20)
    assert setup.status()["revision"] == before["revision"]


async def test_changes_by_others_are_seen_at_the_next_look(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 2)
    for _ in range(15):
        setup.api.races = 1  # somebody writes before each write of the operator
        with suppress(Unavailable):
            await setup.look(operator)
        setup.api.races = 0
        await setup.look(operator)
    assert setup.status()["revision"] != old


async def test_a_cancelled_canary_leaves_nothing(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 5)
    change_image(setup.api, "v1")
    await setup.look(operator, 5)
    assert setup.canary()[0] == "Cancelled"
    assert all(old in name for name in setup.cohorts())
    assert setup.weights == {}


async def test_half_of_a_change_starts_no_canary(setup: Setup) -> None:
    operator, _ = await installed(setup)
    for pool in ("decode", "prefill"):  # as `kubectl apply` writes them
        change_image(setup.api, "v2", pool)
        await setup.look(operator)
        assert len(setup.cohorts()) == 2
    await setup.look(operator)
    assert len(setup.cohorts()) == 4


async def test_a_canary_that_another_one_replaces_leaves_nothing(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 3)
    first = setup.status()["canary"]["revision"]
    change_image(setup.api, "v3")
    await setup.look(operator, 3)
    second = setup.status()["canary"]["revision"]
    assert first != second
    assert {name.rpartition("-")[2] for name in setup.cohorts()} == {old, second}
    made = [x["metadata"]["name"] for x in setup.api.listed("deployments", {})]
    assert not any(first in name for name in made)


async def test_the_old_cohort_is_looked_after_during_a_canary(setup: Setup) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 3)
    setup.api.objects["deployments", f"pdserve-decode-{old}"]["spec"]["replicas"] = 0
    setup.broken.add(old)
    await setup.look(operator)
    assert setup.cohorts()[f"pdserve-decode-{old}"] == 3
    (ready,) = (x for x in setup.status()["conditions"] if x["type"] == "Ready")
    assert (ready["status"], ready["message"]) == (
        "False",
        "0 of 2 prefill workers, 0 of 3 decode workers are ready",
    )
    setup.broken.clear()
    setup.api.objects["pdservices", "demo"]["spec"]["decode"]["replicas"] = 5
    await setup.look(operator)
    assert setup.cohorts()[f"pdserve-decode-{old}"] == 5


def crashed(restarts: int) -> dict[str, Any]:
    """Return the status of a pod whose container has crashed."""
    error = "pdserve: engine_args.stepp_s: unknown field\n`pdserve config` prints every key.\n"
    ended = {"exitCode": 2, "message": f"INFO start\n{error}"}
    container = {"name": "worker", "image": "v2", "imageID": "", "ready": False}
    container |= {"restartCount": restarts, "lastState": {"terminated": ended}}
    container |= {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}}
    return {"containerStatuses": [container]}


async def test_a_canary_with_crashing_pods_is_rolled_back_at_once_with_the_reason(
    setup: Setup,
) -> None:
    operator, old = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 2)
    new = setup.status()["canary"]["revision"]
    setup.broken.add(new)
    setup.api.add_pod("decode-x", {REVISION: new}, **crashed(1))
    await setup.look(operator, 2)
    reason = "decode-x: CrashLoopBackOff, 1 restarts: pdserve: engine_args.stepp_s: unknown field"
    assert setup.canary()[0] == "WaitsForWorkers", "once is no loop"
    assert reason in setup.canary()[1]
    setup.api.add_pod("decode-x", {REVISION: new}, **crashed(2))
    await setup.look(operator, 2)
    assert setup.canary()[0] == "RolledBack"
    assert "engine_args.stepp_s: unknown field" in setup.canary()[1]
    assert all(old in name for name in setup.cohorts())


async def test_a_service_that_served_is_not_given_up_when_its_pods_crash(setup: Setup) -> None:
    operator, old = await installed(setup)
    setup.broken.add(old)
    setup.api.add_pod("decode-x", {REVISION: old}, **crashed(50))
    await setup.look(operator, 5)
    assert setup.cohorts() == {f"pdserve-prefill-{old}": 2, f"pdserve-decode-{old}": 3}
    (ready,) = (x for x in setup.status()["conditions"] if x["type"] == "Ready")
    assert "decode-x: CrashLoopBackOff, 50 restarts" in ready["message"]


async def test_a_pending_pod_shows_its_reason(setup: Setup) -> None:
    operator, _ = await installed(setup)
    change_image(setup.api, "v2")
    await setup.look(operator, 2)
    new = setup.status()["canary"]["revision"]
    setup.broken.add(new)
    why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "message": why}
    setup.api.add_pod("decode-x", {REVISION: new}, conditions=[unscheduled])
    await setup.look(operator, 2)
    assert f"decode-x: {why}" in setup.canary()[1]
