"""Several answers to one prompt by router and workers: each is what one engine gives."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest

from pdserve.types import SamplingParams
from tests.cluster import Answer, Cluster
from tests.integration.test_cluster import PLAIN, PROMPT, assert_same
from workers.fake.settings import FakeFaults

FOUR = replace(PLAIN, n=4, seed=3, temperature=1.0, ignore_eos=False)


async def ask(cluster: Cluster, sampling: SamplingParams) -> list[Answer]:
    """The answers by index; what they cost is with the first."""
    answers = [Answer() for _ in range(sampling.n)]
    async for delta in cluster.client.generate(PROMPT, sampling):
        answer = answers[delta.index]
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answers[0].usage = delta.usage or answers[0].usage
        answers[0].receipt = delta.receipt or answers[0].receipt
    return answers


def check(cluster: Cluster, sampling: SamplingParams, answers: list[Answer]) -> None:
    """Each as one engine gives it under its seed."""
    for i, answer in enumerate(answers):
        assert_same(answer, cluster.expected(PROMPT, sampling.of_choice(i)))
    assert answers[0].usage is not None
    assert answers[0].usage.prompt_tokens == len(PROMPT)
    assert answers[0].usage.completion_tokens == sum(len(x.token_ids) for x in answers)


async def test_each_is_what_one_engine_gives_under_its_seed() -> None:
    async with Cluster(prefill=1, decode=2) as cluster:
        asked = [replace(FOUR, seed=100 * i) for i in range(12)]
        asked += [replace(FOUR, max_tokens=most) for most in (1, 2, 3)]
        found = await asyncio.gather(*(ask(cluster, x) for x in asked))
        for sampling, answers in zip(asked, found, strict=True):
            check(cluster, sampling, answers)


@pytest.mark.parametrize("tokens", [0, 2, 20])
async def test_a_decode_worker_that_dies_loses_none(tokens: int) -> None:
    sampling = replace(FOUR, max_tokens=200, ignore_eos=True)
    async with Cluster(prefill=1, decode=2) as cluster:
        for name in ("decode-0", "decode-1"):
            cluster.faults(name, FakeFaults(stall_at_step=tokens + 1))
        asking = asyncio.create_task(ask(cluster, sampling))
        await cluster.until(lambda: cluster.busy("decode-0", "decode-1"))
        (busy,) = cluster.busy("decode-0", "decode-1")
        await cluster.kill(busy)
        for name in {"decode-0", "decode-1"} - {busy}:
            cluster.faults(name, FakeFaults())
        check(cluster, sampling, await asking)


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_the_choices_have_their_index(stream: bool) -> None:
    body = {"n": 3, "seed": 3, "max_tokens": 9, "stream": stream}
    options: dict[str, object] = {"stream_options": {"include_usage": True}} if stream else {}
    async with Cluster(prefill=1, decode=1) as cluster, aiohttp.ClientSession() as session:
        name = next(iter(cluster.workers.values())).info.model.name
        url = f"http://{cluster.http}/v1/completions"
        prompts = {"prompt": PROMPT, "ignore_eos": True, "model": name, "logprobs": 1}
        async with session.post(url, json={**body, **options, **prompts}) as reply:
            assert reply.status == 200
            text = await reply.text()
        if stream:
            parts = [json.loads(x[6:]) for x in text.split("\n\n") if x[6:7] == "{"]
        else:
            parts = [json.loads(text)]
        choices = [choice for part in parts for choice in part["choices"]]
        if not stream:
            assert [choice["index"] for choice in choices] == [0, 1, 2]
        for i in range(3):
            mine = [choice for choice in choices if choice["index"] == i]
            sampling = SamplingParams(max_tokens=9, seed=3 + i, ignore_eos=True)
            expected = cluster.expected(PROMPT, sampling)
            assert "".join(choice["text"] for choice in mine) == expected.text
            assert sum(len(x["logprobs"]["tokens"]) for x in mine if x["logprobs"]) == 9
            assert [x["finish_reason"] for x in mine if x["finish_reason"]] == ["length"]
        usages = [part["usage"] for part in parts if part["usage"]]
        assert [(x["prompt_tokens"], x["completion_tokens"]) for x in usages] == [(70, 27)]
