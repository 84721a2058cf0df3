"""Workers that are taken out of service while they are asked: answers leave them together with
their KV, and whatever goes wrong on that way, nothing is lost and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.cli import main
from pdserve.types import Role
from router import upstream
from tests.cluster import WAIT_S, Answer, Cluster
from tests.integration.test_cluster import LONG, PLAIN, PROMPT, ask_and_hold, assert_same
from tests.integration.test_role_changes import metrics
from workers import service
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.types import SamplingParams


async def command(cluster: Cluster, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--grpc", cluster.grpc])


def told(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_what_runs_goes_on_elsewhere_and_the_worker_can_be_given_work_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "EXPORT_TIMEOUT_S", WAIT_S)
    async with Cluster(prefill=1, decode=2) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        draining = asyncio.create_task(
            command(cluster, "drain", busy, "--timeout", str(WAIT_S), "--json")
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
        *_, last = told(capsys.readouterr().out)
        assert (last["worker"], last["drained"], last["moved_streams"]) == (busy, True, 1)

        assert await command(cluster, "status", "--json", "--timeout", str(WAIT_S)) == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert {row["worker_id"]: row["state"] for row in rows}[busy] == "drained"
        assert await command(cluster, "drain", idle) == 1
        assert f"without worker {idle}: no decode worker" in capsys.readouterr().err
        assert await command(cluster, "drain", busy, "--undo") == 0
        assert (await cluster.entries())[busy].state == "ready"
        assert await command(cluster, "drain", "nobody") == 1
        assert "no worker nobody is registered" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_what_does_not_end_in_time_goes_on_elsewhere(
    role: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its KV, which an engine that makes no step does not let go."""
    monkeypatch.setattr(upstream, "EXPORT_TIMEOUT_S", 0.05)
    async with Cluster(prefill=2, decode=2) as cluster:
        busy, other, asking = await ask_and_hold(cluster, role=role)
        cluster.faults(other, FakeFaults())
        assert await command(cluster, "drain", busy, "--timeout", "0") == 0
        assert "(1 streams moved)" in capsys.readouterr().out
        answer = await asking
        assert_same(answer, cluster.expected(PROMPT, LONG))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)
        assert [x.partition(":")[2] for x in answer.fallbacks] == ["moved"]
        entry = (await cluster.entries())[busy]
        assert not entry.HasField("breaker")


async def test_what_has_nowhere_to_go_waits_for_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other worker is drained too, and comes back while the stream is to move."""
    monkeypatch.setattr(service, "MOVE_S", WAIT_S)
    monkeypatch.setattr(upstream, "EXPORT_TIMEOUT_S", 0.05)
    async with Cluster(prefill=1, decode=2) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        cluster.faults(idle, FakeFaults())
        assert await command(cluster, "drain", idle) == 0
        draining = asyncio.create_task(command(cluster, "drain", busy, "--timeout", "0", "--force"))
        await cluster.until(lambda: cluster.workers[busy].service.is_moving)
        assert not asking.done()
        assert await command(cluster, "drain", idle, "--undo") == 0
        assert_same(await asking, cluster.expected(PROMPT, LONG))
        assert await draining == 0


async def test_a_drain_that_is_taken_back_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        busy, idle, asking = await ask_and_hold(cluster)
        engine = cluster.engine(busy)
        await cluster.until(lambda: engine.faults.stalls(engine._steps + 1))
        draining = asyncio.create_task(command(cluster, "drain", busy, "--timeout", str(WAIT_S)))
        await cluster.until_state(busy, "draining")
        assert await command(cluster, "drain", busy, "--undo") == 0
        assert await draining == 1
        assert f"worker {busy} is not drained" in capsys.readouterr().out
        for name in (busy, idle):
            cluster.faults(name, FakeFaults())
        assert_same(await asking, cluster.expected(PROMPT, LONG))


async def restart(cluster: Cluster, names: Sequence[str]) -> None:
    """Each in turn is drained, told to stop, and replaced by one of its name."""
    for name in names:
        assert await command(cluster, "drain", name, "--timeout", "0.05", "--stop") == 0
        server = cluster.workers.pop(name)
        assert server.told_to_stop.done()
        await server.stop()  # what its process does when `told_to_stop` is done
        await cluster.add(name, Role(name.partition("-")[0]))
        await cluster.until_ready()


NAMES = ("decode-0", "decode-1")


class Leaving:
    """One long answer that the worker `old` decodes; it makes no step until it is let go."""

    def __init__(self, cluster: Cluster, old: str, asking: asyncio.Task[Answer]) -> None:
        self.cluster, self.old, self.asking = cluster, old, asking
        self.new = NAMES[1 - NAMES.index(old)]
        cluster.faults(self.new, FakeFaults())

    def drain(self) -> asyncio.Task[int]:
        """The old worker is to be empty, and has time."""
        return asyncio.create_task(self._drain())

    async def _drain(self) -> int:
        # One that still makes steps lets go at once, and nobody sees it asked.
        engine = self.cluster.engine(self.old)
        await self.cluster.until(lambda: engine.faults.stalls(engine._steps + 1))
        return await command(self.cluster, "drain", self.old, "--timeout", str(WAIT_S))

    async def asked_for(self) -> None:
        """Waits until the old worker's engine has been asked to let go."""
        engine = self.cluster.engine(self.old)
        await self.cluster.until(lambda: engine.ledger().leased_blocks)

    async def whole(self, sampling: SamplingParams = LONG) -> Answer:
        """The answer, which is as if nothing had happened."""
        answer = await asyncio.wait_for(self.asking, WAIT_S)
        assert_same(answer, self.cluster.expected(PROMPT, sampling))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)
        return answer


async def begin(cluster: Cluster, sampling: SamplingParams = LONG) -> Leaving:
    old, _, asking = await ask_and_hold(cluster, sampling)
    return Leaving(cluster, old, asking)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    # Only the test that is about it meets the end of that time.
    monkeypatch.setattr(upstream, "EXPORT_TIMEOUT_S", WAIT_S)
    async with Cluster(prefill=1, decode=2) as found:
        yield found


@pytest.mark.parametrize("kind", ["greedy", "seeded", "stop"])
async def test_a_drained_worker_gives_its_answers_away(cluster: Cluster, kind: str) -> None:
    sampling = LONG if kind == "greedy" else replace(LONG, temperature=1.0, seed=7)
    if kind == "stop":
        text = cluster.expected(PROMPT, sampling).text
        # Late, and nowhere earlier.
        at = next(i for i in range(len(text) - 80, 0, -1) if text.index(text[i : i + 9]) == i)
        sampling = replace(sampling, stop=(text[at : at + 9],))
    leaving = await begin(cluster, sampling)
    draining = leaving.drain()
    await leaving.asked_for()
    cluster.faults(leaving.old, FakeFaults())
    answer = await leaving.whole(sampling)
    assert answer.fallbacks == ("live_kv:moved",)
    assert await draining == 0
    assert answer.receipt is not None
    assert answer.receipt.decode_worker == leaving.new
    assert 'continuations_total{from="live_kv",model="pdserve-demo"} 1.0' in await metrics(cluster)


async def test_an_answer_leaves_one_worker_after_the_other(cluster: Cluster) -> None:
    leaving = await begin(cluster)
    cluster.faults(leaving.new, FakeFaults(stall_at_step=40))
    draining = leaving.drain()
    await leaving.asked_for()
    cluster.faults(leaving.old, FakeFaults())
    assert await draining == 0
    assert await command(cluster, "drain", leaving.old, "--undo") == 0
    await cluster.until_ready()
    leaving.old, leaving.new = leaving.new, leaving.old
    await cluster.until(lambda: cluster.busy(leaving.old))
    draining = leaving.drain()
    await leaving.asked_for()
    cluster.faults(leaving.old, FakeFaults())
    assert (await leaving.whole()).fallbacks == ("live_kv:moved", "live_kv:moved")
    assert await draining == 0


async def test_an_answer_with_nowhere_to_go_ends_where_it_is(cluster: Cluster) -> None:
    leaving = await begin(cluster)
    assert await command(cluster, "drain", leaving.new) == 0
    words = ("drain", leaving.old, "--timeout", str(WAIT_S), "--force")
    draining = asyncio.create_task(command(cluster, *words))
    await cluster.until_state(leaving.old, "draining")
    assert not cluster.engine(leaving.old).ledger().leased_blocks
    cluster.faults(leaving.old, FakeFaults())
    assert not (await leaving.whole()).fallbacks
    assert await draining == 0


async def underway(cluster: Cluster) -> tuple[Leaving, asyncio.Task[int]]:
    """The old worker has let go, and its KV is on the way without an end."""
    leaving = await begin(cluster)
    draining = leaving.drain()
    await leaving.asked_for()
    cluster.faults(leaving.old, FakeFaults(delay_transfer_s=10 * WAIT_S))
    new = cluster.engine(leaving.new)
    old = cluster.engine(leaving.old)
    await cluster.until(lambda: new.ledger().in_flight_blocks and old.ledger().in_flight_blocks)
    return leaving, draining


@pytest.mark.parametrize("which", ["old", "new"])
async def test_an_answer_survives_either_worker_while_its_kv_is_on_the_way(
    cluster: Cluster, which: str
) -> None:
    leaving, draining = await underway(cluster)
    await cluster.kill(getattr(leaving, which))
    first, *others = (await leaving.whole()).fallbacks
    assert first == "live_kv:moved"
    code = "transfer_failed" if which == "old" else "worker_failed"
    assert len(others) == 1
    assert others[0].endswith(f":{code}")
    await draining


@pytest.mark.parametrize("says_its_last_word", [False, True])
async def test_a_worker_that_dies_before_it_gives_its_kv_costs_a_prefill(
    cluster: Cluster, says_its_last_word: bool
) -> None:
    leaving = await begin(cluster)
    draining = leaving.drain()
    await leaving.asked_for()
    if says_its_last_word:
        cluster.crash(leaving.old)
        expected: tuple[str, ...] = ("live_kv:moved", "pair:transfer_failed")
    else:
        await cluster.kill(leaving.old)
        expected = ("pair:worker_failed",)
    assert (await leaving.whole()).fallbacks == expected
    cluster.workers.pop(leaving.old, None)
    await draining


@pytest.mark.parametrize("when", ["asked", "underway"])
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(
    cluster: Cluster, when: str
) -> None:
    if when == "underway":
        leaving, draining = await underway(cluster)
    else:
        leaving = await begin(cluster)
        draining = leaving.drain()
        await leaving.asked_for()
    leaving.asking.cancel()
    await asyncio.wait([leaving.asking])
    cluster.faults(leaving.old, FakeFaults())
    assert await draining == 0
