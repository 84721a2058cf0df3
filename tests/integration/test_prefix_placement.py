"""Requests go where their prompts are cached, and what is predicted to be cached is. Cached KV
comes to where the prompt is computed, if that is faster than computing it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.model import prefix_hash
from pdserve.types import SamplingParams
from tests.support.cluster import Cluster, assert_same
from tests.support.timeouts import wait_until
from workers.fake.prefix_cache import PrefixCache
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK = 16
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def prompt(which: int, blocks: int = 8) -> list[int]:
    return [20 + (which * 5 + i * i) % 40 for i in range(blocks * BLOCK)]


async def until_indexed(cluster: Cluster, *prompts: list[int]) -> None:
    """Wait until the router's index has these prompts for every worker."""
    watches = cluster.router.link_pool._watches
    assert watches is not None

    def is_indexed() -> bool:
        if len(watches._holders) < len(cluster.workers):
            return False
        for name, worker in cluster.workers.items():
            root = prefix_hash.root(worker.info.model.name, BLOCK)
            for token_ids in prompts:
                chain = prefix_hash.chain(token_ids, BLOCK, root)
                held = sum(x in worker.service.cache.blocks for x in chain)
                if watches.index.cached_blocks(chain).get(name, 0) != held:
                    return False
        return True

    await wait_until(is_indexed)


async def ask(cluster: Cluster, token_ids: list[int]) -> tuple[int, tuple[str, str]]:
    """Send a request. Return its cached tokens and workers after the index has been updated."""
    answer = await cluster.ask(token_ids, SAMPLING)
    assert answer.receipt is not None
    await until_indexed(cluster, token_ids)
    receipt = answer.receipt
    return receipt.cached_tokens, (receipt.prefill_worker, receipt.decode_worker)


async def test_prompts_find_their_blocks_on_both_sides() -> None:
    async with Cluster(
        prefill=2, decode=2, engine_args={"prefix_cache": True}, router={"policy": "prefix_aware"}
    ) as cluster:
        await until_indexed(cluster)
        homes = {}
        for which in range(4):
            cached, homes[which] = await ask(cluster, prompt(which))
            assert cached == 0
        assert len({prefill for prefill, _ in homes.values()}) == 2
        for which in (3, 1, 0, 2):
            # A turn that goes on from there, one that goes another way half through, and the same.
            for asked, blocks in (
                (prompt(which) + [7] * 5, 8),
                (prompt(which)[: 4 * BLOCK] + [9] * 12, 4),
                (prompt(which), 7),
            ):
                assert await ask(cluster, asked) == (blocks * BLOCK, homes[which])


async def test_the_index_forgets_the_blocks_of_a_lost_worker() -> None:
    async with Cluster(
        prefill=1, decode=1, engine_args={"prefix_cache": True}, router={"policy": "prefix_aware"}
    ) as cluster:
        for _ in range(2):
            await ask(cluster, prompt(1))
        watches = cluster.router.link_pool._watches
        assert watches is not None
        assert len(watches.index) == 8
        await cluster.kill("prefill-0")
        await wait_until(lambda: cluster.router.fleet.members["prefill-0"].lost)
        await cluster.add("prefill-0")
        await cluster.until_ready()
        await until_indexed(cluster, prompt(1))
        assert (await ask(cluster, prompt(1)))[0] == 0
        assert (await ask(cluster, prompt(1)))[0] == 7 * BLOCK
        await cluster.kill("prefill-0")
        await cluster.kill("decode-0")
        await wait_until(lambda: len(watches.index) == 0)


ANSWER = replace(SAMPLING, max_tokens=4 * BLOCK + 1)


@asynccontextmanager
async def told(*, decode: int = 1, **router: Any) -> AsyncIterator[tuple[Cluster, list[int]]]:
    """Yield a cluster and the prompt of a second turn, whose first turn was answered. A decode
    worker has four blocks of it that no prefill worker has, and computing them takes 130 ms."""
    engine_args = {"prefix_cache": True, "prefill_s": 0.002}
    policy = {"policy": "prefix_aware", **router}
    async with Cluster(prefill=1, decode=decode, engine_args=engine_args, router=policy) as cluster:
        costs = cluster.router.requests.costs

        def knows_steps() -> bool:
            steps = costs.step_model("prefill-0")
            return steps is not None and steps.knows_prefill and steps.knows_decode

        for which in range(10):
            await cluster.ask(prompt(which + 10, blocks=4), ANSWER)
        await wait_until(knows_steps)
        first = await cluster.ask(prompt(1), ANSWER)
        history = prompt(1) + first.token_ids
        await until_indexed(cluster, history)
        yield cluster, history + [7] * 5


def history_at(cluster: Cluster, second: list[int]) -> str:
    """Return the worker that has all of the first turn cached."""
    root = prefix_hash.root("pdserve-demo", BLOCK)
    last = prefix_hash.chain(second, BLOCK, root)[11]
    (holder,) = [x for x, worker in cluster.workers.items() if last in worker.service.cache.blocks]
    return holder


def fetches(cluster: Cluster) -> dict[str, int]:
    """Return the number of copies by result."""
    found = cluster.router.metrics._counts["kv_fetches"]
    return {result: int(count) for (_, result), count in found.items()}


async def test_what_decode_generated_is_copied_to_prefill_and_not_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with told() as (cluster, second):
        answer = await cluster.ask(second, SAMPLING, request_id="turn-2")
        assert_same(answer, cluster.expected(second, SAMPLING))
        receipt = answer.receipt
        assert receipt is not None
        assert (receipt.prefill_worker, receipt.cached_tokens) == ("prefill-0", 12 * BLOCK)
        assert (receipt.fetched_from, receipt.fetched_tokens) == ("decode-0", 4 * BLOCK)
        assert receipt.fetched_blocks > 0 < receipt.fetch_s
        assert fetches(cluster) == {"fetched": 1}
        assert await cluster.command("explain", "turn-2", "--json") == 0
        (decision,) = json.loads(capsys.readouterr().out)["decisions"]
        found = {x["worker_id"]: x for x in decision["candidates"]}["prefill-0"]
        assert (found["cached_tokens"], found["fetch"]["tokens"]) == (8 * BLOCK, 4 * BLOCK)
        assert found["fetch"]["pays"]
        assert found["fetch"]["copy_s"] < found["fetch"]["compute_s"]
        await until_indexed(cluster, second)
        again = await cluster.ask(second, SAMPLING)
        assert again.receipt is not None
        assert again.receipt.fetched_tokens == 0, "prefill has the blocks now"


async def test_prompts_that_begin_alike_share_a_copy() -> None:
    async with told() as (cluster, second):
        asked = [second + [9] * i for i in range(4)]
        answers = await asyncio.gather(*(cluster.ask(x, SAMPLING) for x in asked))
        for token_ids, answer in zip(asked, answers, strict=True):
            assert_same(answer, cluster.expected(token_ids, SAMPLING))
        assert fetches(cluster) == {"fetched": 1}
        assert {x.usage and x.usage.cached_tokens for x in answers} == {12 * BLOCK}


async def test_nothing_is_copied_if_that_is_switched_off() -> None:
    async with told(fetch_cached_kv=False) as (cluster, second):
        answer = await cluster.ask(second, SAMPLING)
        assert_same(answer, cluster.expected(second, SAMPLING))
        assert answer.receipt is not None
        assert answer.receipt.cached_tokens == 8 * BLOCK
        assert fetches(cluster) == {}


@pytest.mark.parametrize("fault", ["gone", "late", "failed"])
async def test_a_prompt_is_computed_if_its_blocks_do_not_come(fault: str) -> None:
    """The holder has evicted them, does not send them in time, or fails at it."""
    async with told() as (cluster, second):
        engine = cluster.engine("decode-0")
        match fault:
            case "gone":
                engine._cache = PrefixCache("pdserve-demo", BLOCK, 4096)
            case "late":
                engine.faults = FakeFaults(delay_transfer_s=3600.0)
            case "failed":
                engine.faults = FakeFaults(drop_transfer="turn-2")
        answer = await cluster.ask(second, SAMPLING, request_id="turn-2")
        assert_same(answer, cluster.expected(second, SAMPLING))
        assert answer.receipt is not None
        assert answer.receipt.cached_tokens == 8 * BLOCK
        assert (answer.receipt.fetched_tokens, answer.fallbacks) == (0, ())
        assert fetches(cluster) == {fault: 1}


@pytest.mark.parametrize("fault", ["the client goes", "the holder dies", "the receiver dies"])
async def test_a_copy_under_way_leaves_nothing_behind(fault: str) -> None:
    async with told(decode=2) as (cluster, second):
        holder = history_at(cluster, second)
        cluster.faults(holder, FakeFaults(delay_transfer_s=3600.0))
        asking = asyncio.create_task(cluster.ask(second, SAMPLING))
        await wait_until(lambda: cluster.engine(holder).ledger().in_flight_blocks)
        if fault == "the client goes":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            return
        await cluster.kill(holder if "holder" in fault else "prefill-0")
        answer = await asking
        assert_same(answer, cluster.expected(second, SAMPLING))
