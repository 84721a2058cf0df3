"""Workers that leave, die or change their role, on real vLLM behind a router. Every answer is
exactly that of an undisturbed engine, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from pdserve.types import Constraint, SamplingParams, StructuredOutput
from pdserve.v1 import worker_pb2 as w
from tests.support.cluster import Cluster
from tests.support.engine_pair import JoinedAnswer, joined, prompt
from tests.support.started_workers import vllm
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.engines import EngineProcess
    from tests.support.open_request import OpenRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")
PLAIN = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
WORKERS = ("prefill-0", "decode-0", "decode-1")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 9},
    "structured": {
        "structured_output": StructuredOutput(Constraint.REGEX, "([a-c]{3}-[0-9]{2} )+")
    },
    "characters of many bytes": {"logit_bias": {}},
    "stop string": {},
    # Together at most MAX_UNSENT_DELTAS, so a test that gets no time to read loses no answer.
    "several answers": {"n": 3, "temperature": 0.9, "seed": 77, "max_tokens": 680},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(tiny_model: Path) -> AsyncIterator[Cluster]:
    async with Cluster(engine=vllm(tiny_model)) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def service(running: Cluster) -> AsyncIterator[Cluster]:
    """Start missing workers before a test, and assert that it leaves them empty."""
    for name in WORKERS:
        if name not in running.names:
            await running.add(name)
    await running.until_ready()
    yield running
    await running.until_empty()


async def expected_of(
    engine: EngineProcess, ids: list[int], sampling: SamplingParams
) -> list[JoinedAnswer]:
    runs = [engine.run(ids, sampling.of_choice(i)) for i in range(sampling.n)]
    return [joined(x) for x in await asyncio.gather(*runs)]


Jobs = dict[str, tuple[list[int], SamplingParams]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def jobs(aggregated: EngineProcess) -> tuple[Jobs, dict[str, list[JoinedAnswer]]]:
    """Return a long request of each kind, with its expected answer."""
    found: Jobs = {}
    for number, (kind, fields) in enumerate(KINDS.items()):
        ids, sampling = prompt(90 + 40 * number, number), replace(PLAIN, **fields)
        if kind == "stop string":
            text = (await aggregated.run(ids, sampling)).text
            # Late, and nowhere earlier.
            at = next(i for i in range(len(text) - 80, 0, -1) if text.index(text[i : i + 6]) == i)
            sampling = replace(sampling, stop=(text[at : at + 6],))
        found[kind] = ids, sampling
    runs = await asyncio.gather(*(expected_of(aggregated, *job) for job in found.values()))
    return found, dict(zip(found, runs, strict=True))


async def check(asked: dict[str, OpenRequest], expected: dict[str, list[JoinedAnswer]]) -> None:
    """Assert that every answer is exact and that each of its tokens was counted once."""
    for kind, one in asked.items():
        await one.task
        assert one.answers == expected[kind], kind
        assert one.last is not None
        assert one.last.usage is not None
        assert one.last.usage.completion_tokens == one.tokens


async def test_every_kind_of_answer_leaves_a_worker_with_its_kv(
    service: Cluster, jobs: tuple[Jobs, dict[str, list[JoinedAnswer]]]
) -> None:
    """All are on one decode worker, which is drained, and then on the other, which gets a SIGTERM.
    Both have time: nobody need be moved by another prefill, and nobody is."""
    asked_for, expected = jobs
    assert any(ord(c) > 0x7F for c in expected["characters of many bytes"][0].text)
    assert expected["stop string"][0].stop_reason is not None
    await service.drain("decode-1")
    asked = {kind: service.open(*job) for kind, job in asked_for.items()}
    for one in asked.values():
        await one.until(3 * len(one.pieces))
    await service.undrain("decode-1")
    await service.drain("decode-0")
    assert (await service.status("decode-0")).ledger == w.KvLedger()
    await service.undrain("decode-0")
    assert await service.end("decode-1") == 0
    await check(asked, expected)
    fallbacks = [name for one in asked.values() for name in one.fallbacks]
    assert set(fallbacks) == {"live_kv:moved"}


async def test_a_worker_changes_its_role_under_answers_and_loses_none(
    service: Cluster, aggregated: EngineProcess
) -> None:
    """The worker serves requests in each role."""
    is_over, workers, answered = False, set(), asyncio.Event()

    async def keep_asking(first_seed: int) -> None:
        for seed in itertools.count(first_seed, 3):
            ids, sampling = prompt(500, seed), replace(PLAIN, max_tokens=24)
            asked = service.open(ids, sampling)
            await asked.task
            assert asked.answers == await expected_of(aggregated, ids, sampling)
            assert set(asked.fallbacks) <= {"live_kv:moved"}
            assert asked.last is not None
            receipt = asked.last.receipt
            assert receipt is not None
            workers.add((receipt.prefill_worker, receipt.decode_worker))
            answered.set()
            if is_over:
                return

    asking = [asyncio.create_task(keep_asking(900 + i)) for i in range(3)]
    for role, place in ((w.ROLE_PREFILL, 0), (w.ROLE_DECODE, 1)):
        done = await service.change_role("decode-1", role)
        assert not done.failure
        assert done.probe_s > 0
        workers.clear()
        async with asyncio.timeout(WAIT_S):
            while "decode-1" not in {pair[place] for pair in workers}:
                assert not any(task.done() for task in asking)
                answered.clear()
                await answered.wait()
    is_over = True
    await asyncio.gather(*asking)
