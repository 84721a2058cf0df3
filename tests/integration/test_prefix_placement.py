"""Requests go where their prompts are cached, and what is predicted to be cached is."""

from __future__ import annotations

from pdserve.model import prefix_hash
from pdserve.types import Role, SamplingParams
from tests.support.cluster import Cluster
from tests.support.timeouts import wait_until

BLOCK = 16
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def prompt(which: int, blocks: int = 8) -> list[int]:
    return [20 + (which * 5 + i * i) % 40 for i in range(blocks * BLOCK)]


async def until_indexed(cluster: Cluster, *prompts: list[int]) -> None:
    """Wait until the router's index has these prompts for every worker."""
    watches = cluster.router.connections._watches
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
        watches = cluster.router.connections._watches
        assert watches is not None
        assert len(watches.index) == 8
        await cluster.kill("prefill-0")
        await wait_until(lambda: cluster.router.fleet.members["prefill-0"].lost)
        await cluster.add("prefill-0", Role.PREFILL)
        await cluster.until_ready()
        await until_indexed(cluster, prompt(1))
        assert (await ask(cluster, prompt(1)))[0] == 0
        assert (await ask(cluster, prompt(1)))[0] == 7 * BLOCK
        await cluster.kill("prefill-0")
        await cluster.kill("decode-0")
        await wait_until(lambda: len(watches.index) == 0)
