"""Workers that are taken out of service while they are asked: nothing is lost."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from pdserve.cli import main
from pdserve.types import Role
from router import upstream
from tests.cluster import WAIT_S, Cluster
from tests.integration.test_cluster import LONG, PLAIN, PROMPT, ask_and_hold, assert_same
from tests.integration.test_role_changes import under_load
from workers import service
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import Sequence


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

        assert await command(cluster, "status", "--json") == 0
        rows = json.loads(capsys.readouterr().out)["workers"]
        assert {row["worker_id"]: row["state"] for row in rows}[busy] == "drained"
        assert await command(cluster, "drain", idle) == 1
        assert f"without worker {idle}: no decode worker" in capsys.readouterr().err
        assert await command(cluster, "drain", busy, "--undo") == 0
        await cluster.until_ready()
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


async def test_every_worker_is_restarted_under_load_and_no_request_fails() -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    async with (
        Cluster(prefill=2, decode=2, engine_args={"step_s": 0.003}) as cluster,
        under_load(cluster) as counts,
    ):
        await cluster.until(lambda: all(counts))
        await restart(cluster, names)
        before = sum(counts)
        await cluster.until(lambda: sum(counts) > before)
