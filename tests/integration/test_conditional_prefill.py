"""`slo_aware` over real routers and workers, whose engines take as long as they are told: prefill
goes to the decode worker where the first token is sooner there, and stays away where it would hold
up those who decode."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.config import SloConfig
from pdserve.types import SamplingParams
from tests.cluster import WAIT_S, Answer, Cluster
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pdserve.types import Receipt

PLAIN = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = replace(PLAIN, max_tokens=600)
ONE = replace(PLAIN, max_tokens=1)
TIMING: dict[str, object] = {"step_s": 0.002, "prefill_s": 0.0002}
SLO = SloConfig(ttft_s=1.0, tpot_s=0.004, reject_factor=0.0)


def prompt(tokens: int) -> list[int]:
    return [20 + i % 200 for i in range(tokens)]


async def ask(cluster: Cluster, tokens: int, sampling: SamplingParams = PLAIN) -> Receipt:
    answer = await cluster.ask(prompt(tokens), sampling)
    assert answer.token_ids == cluster.expected(prompt(tokens), sampling).token_ids
    assert answer.receipt is not None
    return answer.receipt


async def learn(cluster: Cluster) -> Receipt:
    """Asks until the router predicts; the first answer's receipt."""
    first = await ask(cluster, 50)
    async with asyncio.timeout(WAIT_S):
        while not (await ask(cluster, 400)).predicted_ttft_s:
            pass
    return first


async def decoding(cluster: Cluster, count: int) -> list[asyncio.Task[Answer]]:
    """So many answers that decode-0 decodes, and will go on with when its faults are lifted."""
    begun = [asyncio.Event() for _ in range(count)]

    def note(event: asyncio.Event, answer: Answer) -> None:
        if len(answer.token_ids) > 2:
            event.set()

    tasks = [
        asyncio.create_task(
            cluster.ask(prompt(30), LONG, on_token=lambda answer, e=event: note(e, answer))
        )
        for event in begun
    ]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(event.wait() for event in begun))
    cluster.faults("decode-0", FakeFaults(stalled=True))
    return tasks


async def test_prefill_goes_where_everybody_waits_least() -> None:
    async with Cluster(
        prefill=1, decode=1, engine_args=TIMING, router={"policy": "slo_aware", "slo": SLO}
    ) as cluster:
        first = await learn(cluster)
        # What is not known yet is not guessed at.
        assert (first.predicted_ttft_s, first.first_token_source) == (0.0, "prefill")

        held = await decoding(cluster, 4)
        worker = cluster.workers["decode-0"].service
        before = worker.open_streams
        harmful = asyncio.create_task(ask(cluster, 1500))
        await cluster.until(lambda: worker.open_streams > before)
        cluster.faults("decode-0", FakeFaults())
        receipt = await harmful
        assert receipt.first_token_source == "prefill"
        assert receipt.predicted_ttft_s == pytest.approx(0.302, rel=0.2)
        await asyncio.gather(*held)

        # A prompt of one token is the prefill worker's alone, and now holds it up.
        cluster.faults("prefill-0", FakeFaults(stalled=True))
        ahead = asyncio.create_task(ask(cluster, 2000, ONE))
        await cluster.until(lambda: cluster.busy("prefill-0"))
        receipt = await ask(cluster, 300)
        assert receipt.first_token_source == "decode"
        assert receipt.transport == ""
        assert receipt.predicted_ttft_s == pytest.approx(0.062, rel=0.2)
        cluster.faults("prefill-0", FakeFaults())
        assert (await ahead).first_token_source == "prefill"

        steps = cluster.router.requests._services.costs.step_model("prefill-0")
        assert steps is not None
        token_s = steps.coefficients[1] / 1e3
        assert token_s == pytest.approx(TIMING["prefill_s"], rel=0.1)
