"""Prompts wait where they can be put in order, not in an engine; and what other routers hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.types import FinishReason, Role, SamplingParams, StreamDelta, WorkerLoad
from router.admission import AdmissionLimits
from router.member import Member
from router.pool import WorkerPool
from router.prefill_queue import ASSUMED_CHUNK_TOKENS, PrefillQueue, chunk_tokens
from tests.fakes import ScriptedWorker, running_stack, worker_info
from tests.unit.router.asking import read, request

if TYPE_CHECKING:
    from pdserve.v1 import worker_pb2 as w
    from tests.fakes import Stack

CHUNK = {"max_num_batched_tokens": "64"}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("chunks", "outstanding", "prompt", "takes"),
    [
        (2, 0, 10, True),
        (2, 0, 5000, True),  # a longer one goes when the worker has no other
        (2, 100, 28, True),
        (2, 100, 29, False),
        (2, 5000, 1, False),
        (1, 64, 1, False),
        (0, 5000, 5000, True),
    ],
)
def test_what_a_worker_is_given(chunks: int, outstanding: int, prompt: int, takes: bool) -> None:
    member = Member(worker_info("p", Role.PREFILL, settings=CHUNK), 1.0)
    member.outstanding_tokens = outstanding
    assert PrefillQueue(chunks).takes(member.seen(), prompt) is takes


def test_a_worker_that_does_not_tell_its_chunk() -> None:
    assert chunk_tokens(worker_info("p", Role.PREFILL)) == ASSUMED_CHUNK_TOKENS


def prompt(tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": (1,) * tokens, "sampling": SamplingParams(max_tokens=4)}


async def answer_all(stack: Stack, asked: list[int]) -> list[asyncio.Task[Any]]:
    async def one(tokens: int) -> None:
        async with stack.coordinator.generate(request(**prompt(tokens))) as answer:
            await read(answer)

    tasks = []
    for tokens in asked:
        tasks.append(asyncio.create_task(one(tokens)))
        for _ in range(5):
            await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    ("chunks", "order"),
    [
        (2, [300, 10, 20, 30, 310, 320, 330]),
        (0, [300, 310, 320, 330, 30, 20, 10]),
    ],
)
async def test_a_short_prompt_does_not_wait_behind_long_ones(chunks: int, order: list[int]) -> None:
    prefill = ScriptedWorker("p", Role.PREFILL, settings=CHUNK)
    decode = ScriptedWorker("d", Role.DECODE, total_blocks=1000)
    queue = PrefillQueue(chunks)
    async with running_stack(prefill, decode, prefill_queue=queue) as stack:
        tasks = await answer_all(stack, [300, 310, 320, 330, 30, 20, 10])
        seen: list[w.Submit] = []
        while len(seen) < len(order):
            submit = await prefill.submitted()
            seen.append(submit)
            # Ends the answer: decode, which has its place, is told to leave off.
            prefill.send(submit, 7, finish=STOP)
        await asyncio.gather(*tasks)
        assert [len(submit.prompt_token_ids) for submit in seen] == order


async def test_who_waits_is_looked_at_once_for_all_prompts_that_end_in_a_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill = ScriptedWorker("p", Role.PREFILL, settings=CHUNK)
    decode = ScriptedWorker("d", Role.DECODE, total_blocks=1000)
    async with running_stack(prefill, decode, prefill_queue=PrefillQueue(2)) as stack:
        tasks = await answer_all(stack, [30, 30, 30, 30, 100])
        submits = [await prefill.submitted() for _ in range(4)]
        looks, book = [], stack.coordinator._booker.book
        monkeypatch.setattr(
            stack.coordinator._booker, "book", lambda demand: looks.append(demand) or book(demand)
        )
        prefill.step(*(StreamDelta(x.stream_id, (7,), finish_reason=LENGTH) for x in submits))
        submits.append(await prefill.submitted())
        assert [demand.prompt_tokens for demand in looks] == [100]
        prefill.send(submits[-1], 7, finish=LENGTH)
        for _ in submits:
            decode.send(await decode.submitted(), 8, finish=STOP)
        await asyncio.gather(*tasks)


async def test_decode_has_room_for_all_that_is_being_prefilled() -> None:
    """Joint admission: nothing is prefilled whose KV has no room where it goes."""
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode, limits=AdmissionLimits(64, 64)) as stack:
        # 104 tokens are 7 blocks; the worker has 100.
        tasks = await answer_all(stack, [100] * 20)
        assert stack.member(decode).reserved_blocks == 98
        assert stack.coordinator.running_requests == 14
        for _ in range(20):
            prefill.send(await prefill.submitted(), 7, finish=STOP)
            assert stack.member(decode).reserved_blocks <= 98
        await asyncio.gather(*tasks)


def load(free: int, running: int) -> WorkerLoad:
    return WorkerLoad(0, running, 1 - free / 100, free)


@pytest.mark.parametrize(
    ("free", "running", "foreign"),
    [
        (50, 3, 20),  # two of its three requests are ours, with 30 of the 50 blocks in use
        (50, 2, 0),  # ours alone: what is in use beyond the 30 goes with them
        (90, 3, 0),
        (0, 9, 70),
    ],
)
def test_what_other_routers_hold_is_no_room(free: int, running: int, foreign: int) -> None:
    pool = WorkerPool(lease_s=5.0)
    pool.register(worker_info("d", Role.DECODE), 0.0)
    member = pool.members["d"]
    member.outstanding_requests, member.reserved_blocks = 2, 30
    assert not pool.reported(member, load(free, running))
    assert member.foreign_blocks == foreign
    assert member.seen().has_room((70 - foreign) * 16)
    assert not member.seen().has_room((71 - foreign) * 16)
    assert pool.reported(member, load(100, 0)) is (foreign > 0), "it is known when room grew"
    assert member.foreign_blocks == 0
    pool.reported(member, load(free, running))
    pool.detached(member)
    assert member.foreign_blocks == 0, "what is not known is not counted"


async def test_a_request_waits_for_what_another_router_holds() -> None:
    prefill, decode = ScriptedWorker("p", Role.PREFILL), ScriptedWorker("d", Role.DECODE)
    async with running_stack(prefill, decode) as stack:
        stack.fleet.reported(stack.member(decode), load(5, 3))
        (task,) = await answer_all(stack, [100])
        assert (stack.coordinator.queued_requests, stack.coordinator.running_requests) == (1, 0)
        decode.step(load=load(60, 1))
        prefill.send(await prefill.submitted(), 7, finish=STOP)
        await task
