"""Audits find wrong answers that no digest shows: a decode worker takes the KV that it gets for
other KV, or a worker computes with other weights."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve.config import AuditConfig, CapsulesConfig, HealthConfig
from pdserve.types import Adapter, ModelWeights
from router.steps.audit import DIFFERENT, SAME, SKIPPED, AuditedAnswer, Hop
from tests.support.cluster import LEASE_S, PLAIN, PROMPT, Cluster, Trigger, assert_same
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pathlib import Path

HEALTH = HealthConfig(stall_s=LEASE_S, eject_s=LEASE_S)
ALL = {"audit": AuditConfig(one_in=1, max_age_s=LEASE_S), "health": HEALTH}
# Answers of the model are not audited but for those that a test adds.
ADDED = {"audit": AuditConfig(models={"other": 1}, max_age_s=LEASE_S), "health": HEALTH}
RESULTS = (SAME, DIFFERENT, SKIPPED)


def audits(cluster: Cluster) -> dict[str, int]:
    """Return the number of audits by result."""
    found = dict.fromkeys(RESULTS, 0)
    for line in cluster.router.metrics.render()[0].decode().splitlines():
        for result in RESULTS:
            if line.startswith("pdserve_audits_total{") and f'result="{result}"' in line:
                found[result] = int(float(line.rsplit(" ", 1)[1]))
    return found


async def until_audited(cluster: Cluster, **wanted: int) -> None:
    await wait_until(lambda: audits(cluster) == dict.fromkeys(RESULTS, 0) | wanted)


async def test_the_second_wrong_answer_of_a_pair_ejects_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    router = ALL | {"capsules": CapsulesConfig(directory=str(tmp_path))}
    async with Cluster(prefill=1, decode=1, router=router) as cluster:
        cluster.faults("decode-0", FakeFaults(wrong_kv_from="prefill-0-*"))
        outliers, now = cluster.router.fleet.outliers, cluster.router.fleet.now
        answer = await cluster.ask(PROMPT, PLAIN)
        assert answer.token_ids != cluster.expected(PROMPT, PLAIN).token_ids
        await until_audited(cluster, different=1)
        assert not outliers.ejected(now())
        assert await cluster.command("status") == 0
        shown = capsys.readouterr().out
        assert "0 same, 1 different, 0 skipped; suspects: prefill-0 and decode-0 (1)" in shown

        await cluster.ask([*PROMPT, 20], PLAIN)
        await until_audited(cluster, different=2)
        ((pair, breaker),) = outliers.listed(now())
        assert pair == ("prefill-0", "decode-0")
        assert "an audit by prefill-0 found another token at 1" in breaker.reason
        assert breaker.remaining_s(now()) > ALL["audit"].eject_s - LEASE_S  # type: ignore[attr-defined]
        assert_same(await cluster.ask(PROMPT, PLAIN), cluster.expected(PROMPT, PLAIN))
        await until_audited(cluster, different=2, same=1)

        async def are_kept() -> bool:
            stored = await cluster.router.requests.capsules.listed()
            return [x.header.reason for x in stored] == ["audit", "audit"]

        await wait_until(are_kept)


async def test_a_worker_that_is_wrong_in_two_pairs_is_suspended() -> None:
    async with Cluster(prefill=2, decode=2, router=ALL) as cluster:
        cluster.faults("decode-0", FakeFaults(wrong_kv_from="*"))
        members, asked = cluster.router.fleet.members, 0
        while not members["decode-0"].suspended:
            asked += 1
            await cluster.ask([*PROMPT, asked], PLAIN)
            await wait_until(lambda n=asked: sum(audits(cluster).values()) == n)
        assert "an audit by" in members["decode-0"].breaker.reason
        assert [x for x in members.values() if x.suspended] == [members["decode-0"]]


async def test_a_third_worker_decides_which_of_two_is_wrong() -> None:
    async with Cluster(aggregated=3, router=ALL) as cluster:
        cluster.faults("aggregated-1", FakeFaults(computes_wrong=True))
        members, asked = cluster.router.fleet.members, 0
        while not members["aggregated-1"].suspended:
            asked += 1
            await cluster.ask([*PROMPT, asked], PLAIN)
            await wait_until(lambda n=asked: sum(audits(cluster).values()) == n)
        assert [x for x in members.values() if x.suspended] == [members["aggregated-1"]]


async def test_an_answer_that_another_worker_continued_is_confirmed() -> None:
    async with Cluster(prefill=1, decode=1, router=ALL) as cluster:
        cluster.faults("decode-0", FakeFaults(stall_at_step=10))
        trigger = Trigger(5)
        asking = asyncio.create_task(cluster.ask(PROMPT, PLAIN, on_token=trigger))
        await trigger.fired.wait()
        await cluster.kill("decode-0")
        answer = await asking
        assert answer.fallbacks
        assert_same(answer, cluster.expected(PROMPT, PLAIN))
        await until_audited(cluster, same=1)


def answer_of(cluster: Cluster, **changes: Any) -> AuditedAnswer:
    """Return a right answer of the worker aggregated-0."""
    info = next(iter(cluster.workers.values())).info
    answer = AuditedAnswer(
        request_id="a",
        model=info.model.name,
        tenant="",
        prompt_token_ids=PROMPT,
        token_ids=tuple(cluster.expected(PROMPT, PLAIN).token_ids),
        resumed=0,
        seed=None,
        adapter=None,
        weights=ModelWeights(),
        compatibility="" if info.kv is None else info.kv.compatibility,
        revision="",
        regions=None,
        hops=(Hop(0, ("aggregated-0",), None),),
    )
    return structs.replace(answer, **changes)


def add(cluster: Cluster, **changes: Any) -> None:
    """Let an answer wait for an audit."""
    queue = cluster.router.requests.audits
    assert queue is not None
    queue.add(answer_of(cluster, **changes), cluster.router.fleet.now())


async def test_an_audit_stops_when_a_request_needs_its_worker() -> None:
    async with Cluster(aggregated=1, router=ADDED) as cluster:
        engine, requests = cluster.engine("aggregated-0"), cluster.router.requests
        placed = cluster.router.fleet.members["aggregated-0"].placed
        await cluster.ask(PROMPT, PLAIN)
        cluster.faults("aggregated-0", FakeFaults(stalled=True))
        add(cluster)
        await wait_until(lambda: engine.load().num_waiting_reqs == 1)
        asking = asyncio.create_task(cluster.ask(PROMPT, PLAIN))
        await wait_until(lambda: requests.admission.running == placed.outstanding_requests == 1)
        assert not any(audits(cluster).values())
        cluster.faults("aggregated-0", FakeFaults())
        assert_same(await asking, cluster.expected(PROMPT, PLAIN))
        await until_audited(cluster, same=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": Adapter("a", "0", "", "fake")},
        {"regions": frozenset(["eu"])},
        {"compatibility": "another"},
        {"revision": "another"},
    ],
    ids=lambda x: next(iter(x)),
)
async def test_only_a_worker_like_the_first_computes_an_answer_again(
    changes: dict[str, Any],
) -> None:
    async with Cluster(aggregated=1, router=ADDED) as cluster:
        add(cluster, **changes)
        add(cluster)
        await until_audited(cluster, same=1)
        queue = cluster.router.requests.audits
        assert queue is not None
        assert len(queue.waiting) == 1


async def test_an_answer_is_skipped_once_its_weights_are_gone() -> None:
    async with Cluster(aggregated=1, router=ADDED) as cluster:
        add(cluster, weights=ModelWeights(1, "old"))
        await until_audited(cluster, skipped=1)


async def test_an_answer_is_skipped_once_it_is_old() -> None:
    config = AuditConfig(models={"other": 1}, max_age_s=0.001)
    async with Cluster(aggregated=1, router={"audit": config}) as cluster:
        add(cluster, revision="another")
        await until_audited(cluster, skipped=1)


async def test_audits_are_waste_and_written_to_the_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    router = ADDED | {"residency": {"ledger": str(ledger)}}
    async with Cluster(aggregated=1, router=router) as cluster:
        add(cluster)
        await until_audited(cluster, same=1)
        shown = cluster.router.metrics.render()[0].decode()
        assert any('reason="audit"' in x for x in shown.splitlines())
        lines = map(json.loads, ledger.read_text("utf-8").splitlines())
        sent = [x for x in lines if x["request_id"] == "a" and x["data"] == "prompt"]
        assert [(x["to"], x["bytes"]) for x in sent] == [("aggregated-0", 4 * (len(PROMPT) + 40))]
