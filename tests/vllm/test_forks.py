"""Several answers to one prompt: one prefill, one transfer, shared blocks, and each answer as the
aggregated engine gives it under its seed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from pdserve.types import FinishReason, SamplingParams
from tests.patience import HUNG_S
from tests.vllm.pair import joined
from tests.vllm.test_handoff_exact import BLOCK, KINDS, params, prompt

if TYPE_CHECKING:
    from tests.vllm.engines import EngineProcess
    from tests.vllm.pair import Pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(HUNG_S),
]
STOP = "stop strings, seeded"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    STOP: {"temperature": 0.9, "seed": 3, "stop": ("e", "t")},
    **KINDS,
}


def seeds_of(sampling: SamplingParams, n: int) -> list[int | None]:
    return [replace(sampling, n=n).of_choice(i).seed for i in range(n)]


async def test_seeds_are_those_that_vllm_gives_its_own_children() -> None:
    parent = ParentRequest(
        EngineCoreRequest(
            request_id="r",
            external_req_id="r",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=VllmSamplingParams(n=4, seed=11),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    theirs = [parent.get_child_info(i)[1].seed for i in range(4)]
    assert seeds_of(SamplingParams(seed=11), 4) == theirs


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", CASES)
async def test_every_answer_is_exact(
    pair_shm: Pair, aggregated: EngineProcess, kind: str, n: int
) -> None:
    ids, sampling = prompt(190 + n, 21), params(24, **CASES[kind])
    seeds = seeds_of(sampling, n)
    expected = [joined(await aggregated.run(ids, replace(sampling, seed=s))) for s in seeds]
    streams = pair_shm.submit(ids, sampling, fork_seeds=seeds[1:])
    found = [await pair_shm.collect(streams)]
    if len(pair_shm.last) == 1:
        return  # the leader's first token was its last: there was nothing to fork from
    assert pair_shm.last[1].report is not None
    assert pair_shm.last[1].report.transfer is not None
    for stream_id in range(streams[1] + 1, streams[1] + n):
        answer = await pair_shm.decode.collect(stream_id)
        found.append(joined(answer))
        assert answer.report is not None
        assert answer.report.cached_tokens == (len(ids) - 1) // BLOCK * BLOCK
    assert found == expected
    await pair_shm.until_empty()


@pytest.mark.parametrize("length", [20, 32, 64, 65, 700])
async def test_the_prompts_blocks_are_there_once(
    pair_tcp: Pair, aggregated: EngineProcess, length: int
) -> None:
    n, sampling = 4, params(100, temperature=1.0, seed=9, ignore_eos=True)
    ids, seeds = prompt(length, 33), seeds_of(sampling, n)
    expected = [joined(await aggregated.run(ids, replace(sampling, seed=s))) for s in seeds]
    streams = pair_tcp.submit(ids, sampling, fork_seeds=seeds[1:])
    decode, forks = pair_tcp.decode, list(range(streams[1] + 1, streams[1] + n))
    used = 0
    while not all(decode.answer(s).finish_reason for s in (streams[1], *forks)):
        load, _ = await decode.status()
        assert load is not None
        used = max(used, decode.info.total_blocks - load.free_blocks)
    found = [await pair_tcp.collect(streams)]
    found += [joined(await decode.collect(s)) for s in forks]
    assert found == expected
    shared = (length - 1) // BLOCK
    own = -(-(length + 100) // BLOCK) - shared
    assert shared < used <= shared + n * own + (length % BLOCK == 0)
    await pair_tcp.until_empty()


async def test_leaving_frees_everything_at_every_stage(pair_shm: Pair) -> None:
    sampling = params(400, temperature=1.0, seed=2, ignore_eos=True)
    for wait_for in (None, 0, 2):
        streams = pair_shm.submit(prompt(300, 40), sampling, fork_seeds=[3, 4])
        decode = pair_shm.decode
        if wait_for is not None:
            answer = decode.answer(streams[1] + wait_for)
            await decode.until(lambda answer=answer: answer.token_ids)
        for stream_id in range(streams[1], streams[1] + 3):
            decode.cancel(stream_id)
        pair_shm.prefill.cancel(streams[0])
        await pair_shm.until_empty()


async def test_forks_of_a_whole_request_are_exact(
    pair_shm: Pair, aggregated: EngineProcess
) -> None:
    """On either engine: where the prompt is longer than a chunk, and where one token is wanted."""
    for engine in (pair_shm.decode, aggregated):
        for ids, most in ((prompt(600, 50), 12), (prompt(50, 51), 1)):
            sampling = params(most, temperature=1.0, seed=4, ignore_eos=True, logprobs=2)
            alone = [await aggregated.run(ids, replace(sampling, seed=s)) for s in (4, 5, 6)]
            leader = engine.submit(ids, sampling, fork_seeds=[5, 6])
            found = await asyncio.gather(*(engine.collect(leader + i) for i in range(3)))
            assert [joined(x) for x in found] == [joined(x) for x in alone]
            assert found[0].finish_reason is FinishReason.LENGTH
        await engine.until_empty()
