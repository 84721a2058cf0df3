"""A canary by hand: workers of two revisions, weights at the routers, and what is counted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from pdserve.deploy.scaling.weights import RouterWeights
from pdserve.net.discovery import Discovery
from pdserve.net.rpc import Dialer
from pdserve.types import Role, SamplingParams
from tests.support.cluster import PLAIN, PROMPT, Cluster
from tests.support.commands import run_cli
from tests.support.kubernetes_api import add_service, change_image, kubernetes_api
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "pdserve-demo"


async def weights(cluster: Cluster, *args: str) -> str:
    """Run `pdserve weights` with these arguments."""
    ended = await asyncio.to_thread(run_cli, "weights", MODEL, *args, "--grpc", cluster.grpc)
    return ended.stdout if ended.returncode == 0 else ended.stderr


async def test_a_tenth_goes_to_the_canary_and_none_is_lost_when_that_fails() -> None:
    async with Cluster(prefill=1, decode=1) as cluster:
        for role in (Role.PREFILL, Role.DECODE):
            await cluster.add(f"canary-{role}", role, revision="r2")
        await cluster.until_ready()
        routers = RouterWeights(Discovery((cluster.grpc,)), Dialer())
        assert "'r3'; there are: '', 'r2'" in await weights(cluster, "=9", "r3=1")
        await routers.set_weights(MODEL, {"": 90, "r2": 10})

        expected = cluster.expected(PROMPT, PLAIN)
        for n in range(100):
            answer = await cluster.ask(PROMPT, PLAIN, request_id=f"request-{n}")
            assert answer.token_ids == expected.token_ids
            assert answer.receipt is not None
            # Both phases on workers of one revision.
            used = (answer.receipt.prefill_worker, answer.receipt.decode_worker)
            assert len({x.startswith("canary") for x in used}) == 1
        found = await routers.revisions(MODEL)
        assert (found[""].shares, found["r2"].shares) == ([0.9], [0.1])
        assert found[""].counts["ended"] + found["r2"].counts["ended"] == 100
        assert 5 <= found["r2"].counts["ended"] <= 16
        assert found["r2"].counts["ttft"] == found["r2"].counts["ended"]
        assert found["r2"].ready == {"prefill": 1, "decode": 1}
        entry = (await cluster.entries())["canary-decode"]
        assert (entry.info.revision, entry.revision_share) == ("r2", 0.1)

        # Requests that the canary fails are answered by the other revision, and counted as retried.
        cluster.faults("canary-prefill", FakeFaults(fail_prefill="*"))
        await routers.set_weights(MODEL, {"r2": 1})
        answer = await cluster.ask(PROMPT, PLAIN)
        assert answer.token_ids == expected.token_ids
        assert answer.receipt is not None
        assert answer.receipt.decode_worker == "decode-0"
        assert json.loads(await weights(cluster, "--json"))["r2"]["counts"]["retried"] == 1

        text = await weights(cluster, "--clear")
        assert "pool" in text
        metrics, _ = cluster.router.metrics.render()
        assert b"pdserve_revision_requests_total{" not in metrics


async def test_the_operator_replaces_workers_by_a_canary_at_real_routers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightkube", reason="needs the extra kubernetes")
    from pdserve.deploy.kubernetes.api import connect
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.kubernetes.operator import REVISION, Operator

    async with (
        kubernetes_api(tmp_path) as (api, config),
        Cluster() as cluster,
    ):
        monkeypatch.setenv("KUBECONFIG", str(config))
        add_service(api, model=MODEL)
        routers, now = RouterWeights(Discovery((cluster.grpc,)), Dialer()), 0.0
        shares = cluster.router.requests.shares
        async with connect() as client:
            lease = LeaderLease(client, "pdserve-operator", lambda: now)
            operator = Operator(client, lease, routers, lambda: now)

            async def look() -> str:
                """Let the operator look, start and end workers as the Deployments say, and send
                requests."""
                nonlocal now
                now += 5.0
                await operator.look()
                wanted = {}
                for found in api.listed("deployments", {}):
                    if revision := found["metadata"].get("labels", {}).get(REVISION):
                        name = found["metadata"]["name"]
                        wanted[name] = (Role(name.split("-")[1]), revision)
                for name in cluster.workers.keys() - wanted.keys():
                    await cluster.kill(name)
                for name in wanted.keys() - cluster.workers.keys():
                    role, revision = wanted[name]
                    await cluster.add(name, role, revision=revision)
                await cluster.until_ready()
                for _ in range(5):
                    answer = await cluster.ask(PROMPT, SamplingParams(max_tokens=3))
                    assert answer.finish_reason is not None
                return str(api.objects["pdservices", "demo"].get("status", {}).get("revision"))

            old = [await look() for _ in range(3)][-1]
            change_image(api, "v2")
            revisions = [await look()]
            # How many of the requests the canary gets is drawn.
            while len(revisions) < 100 and (revisions[-1] == old or shares.by_model):
                revisions.append(await look())
            assert revisions[0] == old != revisions[-1]
            assert all(revisions[-1] in name for name in cluster.workers)
            assert shares.by_model == {}
