"""Active health checks find suspended workers and pairs that cannot exchange KV. No client's
request fails to find that out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.config import HealthConfig
from pdserve.errors import DeadlineExceeded
from router.main import RouterLimits
from tests.support.cluster import PLAIN, PROMPT, Cluster, assert_same
from tests.support.commands import run_cli
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from tests.support.cluster import Answer

PAIR = ("prefill-0", "decode-0")

LIMITS = RouterLimits(probe_period_s=0.001)


async def ask(cluster: Cluster) -> Answer:
    answer = await cluster.ask(PROMPT, PLAIN)
    assert_same(answer, cluster.expected(PROMPT, PLAIN))
    assert not answer.fallbacks
    return answer


async def test_only_a_probe_brings_an_ejected_pair_back() -> None:
    async with Cluster(
        prefill=1,
        decode=1,
        router={"health": HealthConfig(stall_s=WAIT_S, eject_s=0.01)},
        limits=LIMITS,
    ) as cluster:
        fleet = cluster.router.fleet
        cluster.faults("prefill-0", FakeFaults(drop_transfer="*"))
        fleet.outliers.corrupted(PAIR, fleet.now(), "for the test")
        # However often the pair is half open meanwhile, no client's request uses it.
        while cluster.probes()[1] < 3:
            answer = await ask(cluster)
            assert answer.receipt is not None
            assert answer.receipt.prefill_worker == "decode-0"
        cluster.faults("prefill-0", FakeFaults())
        await wait_until(lambda: not fleet.outliers.ejected(fleet.now()))
        answer = await ask(cluster)
        assert answer.receipt is not None
        assert answer.receipt.prefill_worker == "prefill-0"
        passed, _ = cluster.probes()
        assert passed >= 1


async def test_only_probes_try_a_suspended_worker() -> None:
    health = HealthConfig(stall_s=1.0, eject_s=0.05)
    router = {"health": health}
    async with Cluster(prefill=1, decode=2, router=router, limits=LIMITS) as cluster:
        fleet = cluster.router.fleet
        member = fleet.members["decode-0"]
        cluster.faults("decode-0", FakeFaults(stalled=True))
        cluster.router.link_pool.suspend(member, "for the test")
        await wait_until(lambda: cluster.busy("decode-0"))
        # A probe hangs there; meanwhile the other worker serves.
        for _ in range(10):
            answer = await ask(cluster)
            assert answer.receipt is not None
            assert answer.receipt.decode_worker == "decode-1"
        await wait_until(lambda: "no engine step" in member.breaker.reason)
        cluster.faults("decode-0", FakeFaults())
        await wait_until(lambda: not member.suspended)
        lines = cluster.router.metrics.render()[0].decode().splitlines()
        assert any(
            x.startswith("pdserve_worker_probes_total{") and 'outcome="failed"' in x for x in lines
        )


async def test_the_last_worker_is_not_suspended_for_being_slow() -> None:
    health = HealthConfig(stall_s=0.5, eject_s=WAIT_S)
    async with Cluster(aggregated=1, router={"health": health}) as cluster:
        member = cluster.router.fleet.members["aggregated-0"]
        cluster.faults("aggregated-0", FakeFaults(stalled=True))
        asking = [asyncio.create_task(ask(cluster))]
        await wait_until(lambda: member in cluster.router.link_pool.suspected)
        asking.append(asyncio.create_task(ask(cluster)))
        with pytest.raises(DeadlineExceeded):
            await cluster.ask(PROMPT, PLAIN, timeout_s=0.5)
        assert (member.state, cluster.busy("aggregated-0")) == ("ready", ["aggregated-0"])
        cluster.faults("aggregated-0", FakeFaults())
        await asyncio.gather(*asking)


SHORT = replace(PLAIN, max_tokens=8)
REASON = "block_size: 16 on prefill-0, 32 on decode-9"


async def test_unpaired_workers_are_explained_and_never_used_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="router")
    async with Cluster(prefill=1, engine_args={"block_size": 16}) as cluster:
        await cluster.add("decode-9", engine_args={"block_size": 32})
        await cluster.until_ready()
        warnings = [x.getMessage() for x in caplog.records if "cannot exchange" in x.getMessage()]
        assert len(warnings) == 1
        assert REASON in warnings[0]

        alone = await cluster.ask(PROMPT, SHORT)
        assert alone.receipt is not None
        assert alone.receipt.prefill_worker == alone.receipt.decode_worker == "decode-9"

        await cluster.add("decode-0")
        await cluster.until_ready()
        answers = await asyncio.gather(*(cluster.ask([*PROMPT, i], SHORT) for i in range(8)))
        for answer in answers:
            assert answer.receipt is not None
            assert answer.receipt.decode_worker == "decode-0"
            assert not answer.fallbacks

        where = ("--grpc", cluster.grpc, "--timeout", str(WAIT_S))
        shown = await asyncio.to_thread(run_cli, "status", *where)
        assert "prefill-0 and decode-9" in shown.stdout
        assert REASON in shown.stdout
        plain = await asyncio.to_thread(run_cli, "status", "--json", *where)
        (pair,) = json.loads(plain.stdout)["unpaired"]
        assert (pair["prefill"], pair["decode"]) == ("prefill-0", "decode-9")
        assert pair["reason"] == REASON
