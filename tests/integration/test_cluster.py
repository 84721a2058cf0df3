"""Router and workers with fake engines. Every answer is that of one engine, also under faults, and
nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.config import HealthConfig
from pdserve.errors import PdserveError
from tests.support.cluster import (
    LONG,
    PLAIN,
    PROMPT,
    WAIT_S,
    Answer,
    Cluster,
    Trigger,
    ask_and_hold,
    assert_same,
)
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from pdserve.types import SamplingParams


class TestAnswers:
    @pytest.mark.parametrize(
        "sampling",
        [
            PLAIN,
            replace(PLAIN, max_tokens=1),
            replace(PLAIN, max_tokens=2),
            replace(PLAIN, temperature=1.0, seed=7),
            replace(PLAIN, logprobs=2),
            replace(PLAIN, ignore_eos=False, max_tokens=300),
            replace(PLAIN, stop=(" ka", "to "), max_tokens=300),
        ],
        ids=["greedy", "one-token", "two-tokens", "seeded", "logprobs", "to-the-end", "stopped"],
    )
    async def test_prefill_and_decode_give_the_answer_of_one_engine(
        self, sampling: SamplingParams
    ) -> None:
        async with Cluster(prefill=1, decode=1) as cluster:
            answer = await cluster.ask(PROMPT, sampling)
            assert_same(answer, cluster.expected(PROMPT, sampling))
            assert answer.receipt is not None
            assert answer.receipt.prefill_worker == "prefill-0"
            assert answer.receipt.first_token_source == "prefill"
            assert not answer.fallbacks
            if len(answer.token_ids) > 1:
                assert answer.receipt.decode_worker == "decode-0"
                assert answer.receipt.transfer_blocks > 0
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(answer.token_ids)

    async def test_many_requests_at_once_do_not_mix(self) -> None:
        async with Cluster(prefill=2, decode=2) as cluster:
            prompts = [[20 + i, *PROMPT[: 3 * i]] for i in range(40)]
            answers = await asyncio.gather(*(cluster.ask(x, PLAIN) for x in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_same(answer, cluster.expected(prompt, PLAIN))
                assert not answer.fallbacks
            registry, labels = cluster.router.metrics.registry, {"model": "pdserve-demo"}
            name = "pdserve_inter_token_latency_seconds_count"
            assert (registry.get_sample_value(name, labels) or 0) >= PLAIN.max_tokens - 2


class TestCancellation:
    @pytest.mark.parametrize(
        ("name", "faults", "tokens"),
        [
            ("prefill-0", FakeFaults(stalled=True), 0),
            ("prefill-0", FakeFaults(delay_transfer_s=1000.0), 1),
            ("decode-0", FakeFaults(stall_at_step=10), 1),
            ("decode-0", FakeFaults(stall_at_step=10), 5),
        ],
        ids=["in prefill", "in transfer", "before decode", "in decode"],
    )
    async def test_a_client_that_leaves_frees_both_workers(
        self, name: str, faults: FakeFaults, tokens: int
    ) -> None:
        async with Cluster(prefill=1, decode=1) as cluster:
            cluster.faults(name, faults)
            trigger, decode = Trigger(tokens), cluster.workers["decode-0"].service
            asking = asyncio.create_task(cluster.ask(PROMPT, LONG, on_token=trigger))
            await wait_until(
                lambda: trigger.fired.is_set() if tokens else decode.ledger().in_flight_blocks
            )
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
            await cluster.until_empty()
            cluster.faults(name, FakeFaults())
            assert_same(await cluster.ask(PROMPT, PLAIN), cluster.expected(PROMPT, PLAIN))

    async def test_a_deadline_ends_the_request_everywhere(self) -> None:
        async with Cluster(prefill=1, decode=1) as cluster:
            cluster.faults("decode-0", FakeFaults(stalled=True))
            with pytest.raises(PdserveError) as caught:
                await cluster.ask(PROMPT, LONG, timeout_s=0.3)
            assert caught.value.code == "deadline_exceeded"
            await cluster.until_empty()


class TestFaults:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    async def test_a_worker_that_dies_costs_no_token(self, role: str) -> None:
        async with Cluster(prefill=2, decode=2) as cluster:
            expected = cluster.expected(PROMPT, LONG)
            busy, other, asking = await ask_and_hold(cluster, role=role)
            cluster.faults(other, FakeFaults())
            await cluster.kill(busy)
            answer = await asking
            assert_same(answer, expected)
            assert answer.fallbacks

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    async def test_a_worker_that_makes_no_step_costs_no_token(self, role: str) -> None:
        """The worker answers RPCs, and its lease never ends."""
        health = HealthConfig(stall_s=1.0, eject_s=0.01)
        async with Cluster(prefill=2, decode=2, router={"health": health}) as cluster:
            expected = cluster.expected(PROMPT, LONG)
            busy, other, asking = await ask_and_hold(cluster, role=role)
            cluster.faults(other, FakeFaults())
            answer = await asking
            assert_same(answer, expected)
            assert answer.fallbacks[0].endswith(":worker_failed")
            entry = (await cluster.entries())[busy]
            assert "no engine step for" in entry.breaker.reason
            # Once it gets on again, a request tries it.
            cluster.faults(busy, FakeFaults())
            async with asyncio.timeout(WAIT_S):
                while (await cluster.entries())[busy].HasField("breaker"):
                    await asyncio.gather(*(cluster.ask(PROMPT, PLAIN) for _ in range(4)))
            assert (await cluster.entries())[busy].state == "ready"

    async def test_a_storm_of_failures_ends_with_clean_errors(self) -> None:
        """Every transfer fails; the budget of retries covers a few requests."""
        health = HealthConfig(stall_s=WAIT_S, eject_s=0.0)
        router = {"retry": {"tokens_per_s": len(PROMPT) / 6}, "health": health}
        async with Cluster(prefill=2, decode=2, router=router) as cluster:
            for name in ("prefill-0", "prefill-1"):
                cluster.faults(name, FakeFaults(drop_transfer="*"))
            asked = [cluster.ask(PROMPT, PLAIN) for _ in range(30)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            failed = [x for x in found if isinstance(x, BaseException)]
            assert failed
            codes = {x.code if isinstance(x, PdserveError) else repr(x) for x in failed}
            assert codes == {"retry_budget_exhausted"}
            for name in ("prefill-0", "prefill-1"):
                cluster.faults(name, FakeFaults())
            assert_same(await cluster.ask(PROMPT, PLAIN), cluster.expected(PROMPT, PLAIN))

    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    async def test_an_engine_that_crashes_costs_no_token(self, name: str) -> None:
        async with Cluster(prefill=2, decode=2) as cluster:
            expected = cluster.expected(PROMPT, PLAIN)
            cluster.faults(name, FakeFaults(crash_at_step=1))
            answers = await asyncio.gather(*(cluster.ask(PROMPT, PLAIN) for _ in range(8)))
            for answer in answers:
                assert_same(answer, expected)
            cluster.forget(name)

    async def test_a_request_and_a_stream_wait_for_the_only_worker_to_come_back(self) -> None:
        async with Cluster(aggregated=1) as cluster:
            expected = cluster.expected(PROMPT, LONG)
            cluster.faults("aggregated-0", FakeFaults(stall_at_step=30))
            trigger = Trigger(20)
            stream = asyncio.create_task(cluster.ask(PROMPT, LONG, on_token=trigger))
            await asyncio.wait_for(trigger.fired.wait(), WAIT_S)
            await cluster.kill("aggregated-0")
            queued = asyncio.create_task(cluster.ask(PROMPT, LONG))
            await wait_until(lambda: cluster.router.requests.admission.queued)
            await cluster.add("aggregated-0")
            assert_same(await stream, expected)
            assert_same(await queued, expected)


async def test_a_request_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        await cluster.ask(PROMPT, PLAIN, request_id="explained")
        assert await cluster.command("explain", "explained") == 0
        assert "prefill on prefill-0, decode on decode-" in capsys.readouterr().out
        assert await cluster.command("explain", "nobody") == 1
        assert "no decision for request nobody is kept" in capsys.readouterr().err
        assert await cluster.command("explain", "explained", "--json") == 0
        assert json.loads(capsys.readouterr().out)["request_id"] == "explained"


FOUR = replace(PLAIN, n=4, seed=3, temperature=1.0, ignore_eos=False)


async def ask_for_several(cluster: Cluster, sampling: SamplingParams) -> list[Answer]:
    """Return the answers by index; the first one has the receipt."""
    answers = [Answer() for _ in range(sampling.n)]
    async for delta in cluster.client.generate(PROMPT, sampling):
        answer = answers[delta.index]
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answers[0].usage = delta.usage or answers[0].usage
        answers[0].receipt = delta.receipt or answers[0].receipt
    return answers


def check_several(cluster: Cluster, sampling: SamplingParams, answers: list[Answer]) -> None:
    """Each answer is that of one engine with its seed."""
    for i, answer in enumerate(answers):
        assert_same(answer, cluster.expected(PROMPT, sampling.of_choice(i)))
    assert answers[0].usage is not None
    assert answers[0].usage.prompt_tokens == len(PROMPT)
    assert answers[0].usage.completion_tokens == sum(len(x.token_ids) for x in answers)


async def test_several_answers_are_each_what_one_engine_gives_under_its_seed() -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        asked = [replace(FOUR, seed=100 * i) for i in range(12)]
        asked += [replace(FOUR, max_tokens=most) for most in (1, 2, 3)]
        found = await asyncio.gather(*(ask_for_several(cluster, x) for x in asked))
        for sampling, answers in zip(asked, found, strict=True):
            check_several(cluster, sampling, answers)


@pytest.mark.parametrize("tokens", [0, 2, 20])
async def test_a_decode_worker_that_dies_loses_none_of_several_answers(tokens: int) -> None:
    sampling = replace(FOUR, max_tokens=200, ignore_eos=True)
    async with Cluster(prefill=1, decode=2) as cluster:
        for name in ("decode-0", "decode-1"):
            cluster.faults(name, FakeFaults(stall_at_step=tokens + 1))
        asking = asyncio.create_task(ask_for_several(cluster, sampling))
        await wait_until(lambda: cluster.busy("decode-0", "decode-1"))
        (busy,) = cluster.busy("decode-0", "decode-1")
        await cluster.kill(busy)
        for name in {"decode-0", "decode-1"} - {busy}:
            cluster.faults(name, FakeFaults())
        check_several(cluster, sampling, await asking)
