"""Charges of routers and reported waste add up to all work of the engines, under load with
cancelled requests, moves, retries and a lost worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from pdserve.types import SamplingParams
from tests.support.cluster import Answer, Cluster
from tests.support.timeouts import wait_until

PLAIN = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
CORE_HOUR = 3600.0
COSTS: dict[str, object] = {"step_s": 0.001, "prefill_s": 0.0001, "decode_s": 0.0002}


async def seconds(cluster: Cluster) -> Counter[tuple[str, str]]:
    """Return the seconds of all workers by kind and reason, after every worker has reported."""
    for worker in cluster.workers.values():
        await worker.routers.renewed()
    found: Counter[tuple[str, str]] = Counter()
    for (_, _, kind, reason), amount in cluster.router.metrics._counts["engine_seconds"].items():
        found[kind, reason] += amount  # type: ignore[assignment]
    return found


async def test_shares_add_up_to_what_the_workers_did() -> None:
    prices = {"prices": {"cpu": CORE_HOUR}}
    async with Cluster(
        prefill=2, decode=2, aggregated=1, engine_args=COSTS, router=prices
    ) as cluster:
        workers = dict(cluster.workers)
        answers: list[Answer] = []

        async def ask(i: int) -> None:
            prompt, leaves = [20 + i % 50] * (5 + 7 * (i % 20)), i % 6 == 0
            length = 400 if leaves else 2 + 5 * (i % 9)
            sampling = replace(PLAIN, max_tokens=length, n=2 if i % 10 == 1 else 1)
            began = asyncio.Event()
            asking = asyncio.create_task(
                cluster.ask(prompt, sampling, on_token=lambda _: began.set())
            )
            if leaves:
                await began.wait()
                asking.cancel()
            await asyncio.wait({asking})
            if not leaves:
                answers.append(asking.result())

        asked = [asyncio.create_task(ask(i)) for i in range(120)]
        await wait_until(lambda: len(answers) > 20 and cluster.busy("decode-0"))
        await cluster.kill("decode-0")
        await asyncio.gather(*asked)
        await cluster.until_empty()

        found = await seconds(cluster)
        busy_s = sum(cluster.engine(name).busy.busy_s for name in workers)
        used_s = found["prefill", ""] + found["decode", ""]
        wasted_s = sum(amount for (kind, _), amount in found.items() if kind == "waste")
        assert used_s + wasted_s == pytest.approx(busy_s, rel=0.01)
        assert found["waste", "cancelled"] > 0
        cores = workers["prefill-0"].info.devices
        paid = sum(answer.receipt.cost or 0.0 for answer in answers if answer.receipt)
        assert paid == pytest.approx(used_s * cores, rel=0.01)
