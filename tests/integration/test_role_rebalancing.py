"""A router that moves workers between prefill and decode by itself, as the load shifts."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from pdserve.config import RolesConfig
from tests.cluster import WAIT_S, Cluster
from tests.integration.test_fake_cluster import PLAIN, PROMPT
from tests.integration.test_role_flips import metrics, role_of, under_load
from workers.fake.settings import FakeFaults

QUICK = RolesConfig(auto=True, window_s=0.3, cooldown_s=0.3)
ENGINES: dict[str, object] = {"step_s": 0.002, "prefill_s": 0.0002, "max_num_seqs": 3}
# Prompts that take longer than their answers, and answers that take longer than their prompts.
PROMPTS = [*PROMPT] * 12, replace(PLAIN, max_tokens=2)
ANSWERS = PROMPT, replace(PLAIN, max_tokens=150)


async def until_split(cluster: Cluster, prefill: int, decode: int) -> None:
    """Until so many of each role are ready."""
    async with asyncio.timeout(WAIT_S):
        while True:
            states = [await role_of(cluster, name) for name in cluster.workers]
            ready = Counter(role for role, state in states if state == "ready")
            if (ready["prefill"], ready["decode"]) == (prefill, decode):
                return
            await asyncio.sleep(0.02)


async def test_the_split_follows_the_load_and_nothing_is_lost() -> None:
    cluster = Cluster(prefill=2, decode=2, engine_args=ENGINES, router={"roles": QUICK})
    async with cluster:
        for load, split in ((PROMPTS, (3, 1)), (ANSWERS, (1, 3))):
            async with under_load(cluster, 8, *load):
                await until_split(cluster, *split)
        roles = await cluster.roles()
        assert (roles.prefill_workers, roles.decode_workers) == (1, 3)
        assert roles.text.startswith("1 prefill worker loaded")
        text = await metrics(cluster)
        assert 'pdserve_role_workers_wanted{model="pdserve-demo",role="decode"} 3.0' in text
        assert 'outcome="failed"' not in text


async def test_after_a_failed_role_change_another_worker_is_tried() -> None:
    cluster = Cluster(prefill=1, decode=3, engine_args=ENGINES, router={"roles": QUICK})
    async with cluster:
        for name in ("decode-0", "decode-1", "decode-2"):
            cluster.faults(name, FakeFaults(fail_prefill="probe-*"))
        async with under_load(cluster, 8, *PROMPTS):
            async with asyncio.timeout(WAIT_S):
                while True:
                    if 'outcome="failed"' in await metrics(cluster):
                        break
                    await asyncio.sleep(0.02)
            cluster.faults("decode-1", FakeFaults())
            cluster.faults("decode-2", FakeFaults())
            await until_split(cluster, 3, 1)
        assert await role_of(cluster, "decode-0") == ("decode", "ready")
