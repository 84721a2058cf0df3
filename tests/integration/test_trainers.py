"""Trainers that update weights engine by engine: each of their engines is the router, and what they
call there several times happens once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.checkpoints import assert_spans, trained
from tests.support.cluster import LONG, PROMPT, Cluster, Trigger
from tests.support.timeouts import WAIT_S
from tests.support.trainers import Engines

if TYPE_CHECKING:
    from pathlib import Path


async def updates(cluster: Cluster) -> float:
    """Return how many updates of the model's weights were made."""
    page = await cluster.metrics()
    name = 'pdserve_weights_updates_total{model="pdserve-demo",result="done"} '
    (found,) = [x for x in page.splitlines() if x.startswith(name)]
    return float(found.removeprefix(name))


async def test_prime_rl_updates_the_weights_while_answers_are_open(tmp_path: Path) -> None:
    async with (
        trained(tmp_path, prefill=1, decode=2) as (cluster, digests),
        Engines([cluster.http] * 3) as engines,
    ):
        await engines.prime_rl_ready("pdserve-demo")
        for step in (1, 2):
            trigger = Trigger(20)
            asking = asyncio.create_task(cluster.ask(PROMPT, LONG, on_token=trigger))
            await asyncio.wait_for(trigger.fired.wait(), WAIT_S)
            await engines.prime_rl_update(tmp_path / str(step))
            assert await updates(cluster) == step
            answer = await asking
            if answer.receipt is not None and answer.receipt.spans:  # it did not end before
                versions = {"default": "", "1": digests[1], "2": digests[2]}
                assert_spans(answer, versions, cluster)
            assert_spans(await cluster.ask(PROMPT, LONG), {str(step): digests[step]}, cluster)


async def test_slime_updates_the_weights_and_deletes_their_files(tmp_path: Path) -> None:
    async with (
        trained(tmp_path, prefill=1, decode=2) as (cluster, digests),
        Engines([cluster.http] * 3) as engines,
    ):
        await engines.slime_ready()
        await engines.slime_update(tmp_path / "1", 1, keeps_files=False)
        assert await engines.slime_versions() == {"1"}
        assert await updates(cluster) == 1
        assert_spans(await cluster.ask(PROMPT, LONG), {"1": digests[1]}, cluster)
        # A worker that starts now cannot get the weights, and stays out until the next ones.
        await cluster.kill("decode-0")
        await cluster.add("decode-0")
        await cluster.until_state("decode-0", "updating")
        assert_spans(await cluster.ask(PROMPT, LONG), {"1": digests[1]}, cluster)
        await engines.slime_update(tmp_path / "2", 2, keeps_files=True)
        await cluster.until_ready()
        assert_spans(await cluster.ask(PROMPT, LONG), {"2": digests[2]}, cluster)


async def test_calls_at_the_addresses_of_workers_make_one_update(tmp_path: Path) -> None:
    async with (
        trained(tmp_path) as (cluster, digests),
        Engines([cluster.http]) as router,
    ):
        for name in ("prefill-0", "decode-0"):
            await cluster.add(name, trainer_calls=cluster.url)
        await cluster.until_ready()
        (listed,) = await router.call("GET", "/v1/rl/workers")
        addresses = [x["address"] for x in listed["workers"]]
        assert addresses == [x.info.debug_address for x in cluster.workers.values()]
        async with Engines(addresses) as engines:
            await engines.prime_rl_ready("pdserve-demo")
            await engines.prime_rl_update(tmp_path / "1")
            assert await updates(cluster) == 1
            assert await engines.slime_versions() == {"1"}
            assert_spans(await cluster.ask(PROMPT, LONG), {"1": digests[1]}, cluster)
            await engines.slime_update(tmp_path / "2", 2, keeps_files=True)
            assert await updates(cluster) == 2
