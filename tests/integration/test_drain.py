"""Drains under load. Answers move to other workers with their KV. No fault during the move loses
tokens or leaves anything behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from router.main import RouterLimits
from router.request_path import PathLimits
from tests.support.cluster import (
    LONG,
    PLAIN,
    PROMPT,
    WAIT_S,
    Answer,
    Cluster,
    ask_and_hold,
    assert_same,
)
from tests.support.started_workers import fake
from tests.support.timeouts import wait_until
from workers.control.worker_drain import DrainTiming
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.types import SamplingParams


async def test_a_drain_moves_open_answers_and_can_be_undone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Cluster(prefill=1, decode=2, limits=PATIENT) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        draining = asyncio.create_task(
            cluster.command("drain", busy, "--timeout", str(WAIT_S), "--json")
        )
        await cluster.until_state(busy, "draining")
        cluster.faults(idle, FakeFaults())
        other = await cluster.ask(PROMPT, PLAIN)
        assert other.receipt is not None
        assert other.receipt.decode_worker == idle
        cluster.faults(busy, FakeFaults())
        answer = await asking
        assert_same(answer, cluster.expected(PROMPT, LONG))
        assert answer.fallbacks == ("live_kv:moved",)
        assert await draining == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (last["worker"], last["drained"], last["moved_streams"]) == (busy, True, 1)

        assert await cluster.command("status", "--json", "--timeout", str(WAIT_S)) == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert {row["worker_id"]: row["state"] for row in rows}[busy] == "drained"
        assert await cluster.command("drain", idle) == 1
        assert f"without worker {idle}: no decode worker" in capsys.readouterr().err
        assert await cluster.command("drain", busy, "--undo") == 0
        assert (await cluster.entries())[busy].state == "ready"
        assert await cluster.command("drain", "nobody") == 1
        assert "no worker nobody is registered" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_an_answer_that_does_not_end_in_time_is_moved_without_its_kv(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that makes no step cannot export KV."""
    async with Cluster(prefill=2, decode=2, limits=IMPATIENT) as cluster:
        busy, other, asking = await ask_and_hold(cluster, role=role)
        cluster.faults(other, FakeFaults())
        assert await cluster.command("drain", busy, "--timeout", "0") == 0
        assert "(1 streams moved)" in capsys.readouterr().out
        answer = await asking
        assert_same(answer, cluster.expected(PROMPT, LONG))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)
        assert [x.partition(":")[2] for x in answer.fallbacks] == ["moved"]
        entry = (await cluster.entries())[busy]
        assert not entry.HasField("breaker")


async def test_an_answer_waits_until_a_worker_can_take_it() -> None:
    """The other worker is drained too, and undrained while the stream is moving."""
    timing = DrainTiming(move_s=WAIT_S)
    async with Cluster(prefill=1, decode=2, limits=IMPATIENT, engine=fake(timing)) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        cluster.faults(idle, FakeFaults())
        assert await cluster.command("drain", idle) == 0
        draining = asyncio.create_task(cluster.command("drain", busy, "--timeout", "0", "--force"))
        await wait_until(lambda: cluster.workers[busy].intake.is_moving)
        assert not asking.done()
        assert await cluster.command("drain", idle, "--undo") == 0
        assert_same(await asking, cluster.expected(PROMPT, LONG))
        assert await draining == 0


async def test_without_a_pair_the_last_worker_alone_needs_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Cluster(prefill=0, decode=2) as cluster:
        assert await cluster.command("drain", "decode-0") == 0
        assert await cluster.command("drain", "decode-1") == 1
        assert "--force drains it anyway" in capsys.readouterr().err
        assert await cluster.command("drain", "decode-1", "--force") == 0


async def test_an_undone_drain_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        engine = cluster.engine(busy)
        await wait_until(lambda: engine.faults.stalls(engine.steps.done + 1))
        draining = asyncio.create_task(cluster.command("drain", busy, "--timeout", str(WAIT_S)))
        await cluster.until_state(busy, "draining")
        assert await cluster.command("drain", busy, "--undo") == 0
        assert await draining == 1
        assert f"worker {busy} is not drained" in capsys.readouterr().out
        for name in (busy, idle):
            cluster.faults(name, FakeFaults())
        assert_same(await asking, cluster.expected(PROMPT, LONG))


NAMES = ("decode-0", "decode-1")
PATIENT, IMPATIENT = (
    RouterLimits(path=PathLimits(export_timeout_s=WAIT_S)),
    RouterLimits(path=PathLimits(export_timeout_s=0.05)),
)


class Leaving:
    """A long answer on the worker `old`, which makes no step until its faults are lifted."""

    def __init__(self, cluster: Cluster, old: str, asking: asyncio.Task[Answer]) -> None:
        self.cluster, self.old, self.asking = cluster, old, asking
        self.new = NAMES[1 - NAMES.index(old)]
        cluster.faults(self.new, FakeFaults())

    def drain(self) -> asyncio.Task[int]:
        """Drain the old worker, without a time limit."""
        return asyncio.create_task(self._drain())

    async def _drain(self) -> int:
        # An engine that still makes steps would export at once.
        engine = self.cluster.engine(self.old)
        await wait_until(lambda: engine.faults.stalls(engine.steps.done + 1))
        return await self.cluster.command("drain", self.old, "--timeout", str(WAIT_S))

    async def until_exporting(self) -> None:
        """Wait until the old worker's engine has the order to export."""
        engine = self.cluster.engine(self.old)
        await wait_until(lambda: engine.ledger().leased_blocks)

    async def whole(self, sampling: SamplingParams = LONG) -> Answer:
        """Return the answer, and assert that it is that of an undisturbed engine."""
        answer = await asyncio.wait_for(self.asking, WAIT_S)
        assert_same(answer, self.cluster.expected(PROMPT, sampling))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)
        return answer


async def begin(cluster: Cluster, sampling: SamplingParams = LONG) -> Leaving:
    old, _, asking = await ask_and_hold(cluster, sampling)
    return Leaving(cluster, old, asking)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(prefill=1, decode=2, limits=PATIENT) as found:
        yield found


@pytest.mark.parametrize("kind", ["greedy", "seeded", "stop"])
async def test_a_drained_worker_exports_its_answers_with_their_kv(
    cluster: Cluster, kind: str
) -> None:
    sampling = LONG if kind == "greedy" else replace(LONG, temperature=1.0, seed=7)
    if kind == "stop":
        text = cluster.expected(PROMPT, sampling).text
        # Late, and nowhere earlier.
        at = next(i for i in range(len(text) - 80, 0, -1) if text.index(text[i : i + 9]) == i)
        sampling = replace(sampling, stop=(text[at : at + 9],))
    leaving = await begin(cluster, sampling)
    draining = leaving.drain()
    await leaving.until_exporting()
    cluster.faults(leaving.old, FakeFaults())
    answer = await leaving.whole(sampling)
    assert answer.fallbacks == ("live_kv:moved",)
    assert await draining == 0
    assert answer.receipt is not None
    assert answer.receipt.decode_worker == leaving.new
    assert 'continuations_total{from="live_kv",model="pdserve-demo"} 1.0' in await cluster.metrics()


async def test_an_answer_can_be_moved_twice(cluster: Cluster) -> None:
    leaving = await begin(cluster)
    cluster.faults(leaving.new, FakeFaults(stall_at_step=40))
    draining = leaving.drain()
    await leaving.until_exporting()
    cluster.faults(leaving.old, FakeFaults())
    assert await draining == 0
    assert await cluster.command("drain", leaving.old, "--undo") == 0
    await cluster.until_ready()
    leaving.old, leaving.new = leaving.new, leaving.old
    await wait_until(lambda: cluster.busy(leaving.old))
    draining = leaving.drain()
    await leaving.until_exporting()
    cluster.faults(leaving.old, FakeFaults())
    assert (await leaving.whole()).fallbacks == ("live_kv:moved", "live_kv:moved")
    assert await draining == 0


async def test_an_answer_stays_if_no_other_worker_can_take_it(cluster: Cluster) -> None:
    leaving = await begin(cluster)
    assert await cluster.command("drain", leaving.new) == 0
    words = ("drain", leaving.old, "--timeout", str(WAIT_S), "--force")
    draining = asyncio.create_task(cluster.command(*words))
    await cluster.until_state(leaving.old, "draining")
    assert not cluster.engine(leaving.old).ledger().leased_blocks
    cluster.faults(leaving.old, FakeFaults())
    assert not (await leaving.whole()).fallbacks
    assert await draining == 0


async def in_transfer(cluster: Cluster) -> tuple[Leaving, asyncio.Task[int]]:
    """Move an answer with a transfer that does not end."""
    leaving = await begin(cluster)
    draining = leaving.drain()
    await leaving.until_exporting()
    cluster.faults(leaving.old, FakeFaults(delay_transfer_s=10 * WAIT_S))
    new = cluster.engine(leaving.new)
    old = cluster.engine(leaving.old)
    await wait_until(lambda: new.ledger().in_flight_blocks and old.ledger().in_flight_blocks)
    return leaving, draining


@pytest.mark.parametrize("which", ["old", "new"])
async def test_an_answer_survives_the_death_of_either_worker_during_the_transfer(
    cluster: Cluster, which: str
) -> None:
    leaving, draining = await in_transfer(cluster)
    await cluster.kill(getattr(leaving, which))
    first, *others = (await leaving.whole()).fallbacks
    assert first == "live_kv:moved"
    code = "transfer_failed" if which == "old" else "worker_failed"
    assert len(others) == 1
    assert others[0].endswith(f":{code}")
    await draining


@pytest.mark.parametrize("engine_dies_first", [False, True])
async def test_a_worker_that_dies_before_its_export_costs_a_prefill(
    cluster: Cluster, engine_dies_first: bool
) -> None:
    leaving = await begin(cluster)
    draining = leaving.drain()
    await leaving.until_exporting()
    if engine_dies_first:
        cluster.crash(leaving.old)
        expected: tuple[str, ...] = ("live_kv:moved", "pair:transfer_failed")
    else:
        await cluster.kill(leaving.old)
        expected = ("pair:worker_failed",)
    assert (await leaving.whole()).fallbacks == expected
    await draining


@pytest.mark.parametrize("when", ["exporting", "in transfer"])
async def test_a_client_that_leaves_during_the_move_leaves_nothing_behind(
    cluster: Cluster, when: str
) -> None:
    if when == "in transfer":
        leaving, draining = await in_transfer(cluster)
    else:
        leaving = await begin(cluster)
        draining = leaving.drain()
        await leaving.until_exporting()
    leaving.asking.cancel()
    await asyncio.wait([leaving.asking])
    cluster.faults(leaving.old, FakeFaults())
    assert await draining == 0
