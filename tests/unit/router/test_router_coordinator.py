"""One coordinator over scripted workers: answers, receipts, fallbacks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from pdserve.config import FallbackConfig
from pdserve.errors import (
    BudgetExhausted,
    InvalidRequest,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.types import FinishReason, Role, SamplingParams, TransferReport, Usage
from router.answer import AnswerDelta
from tests.fakes import ScriptedWorker, running_stack
from tests.patience import WAIT_S
from tests.unit.router.asking import PROMPT, read, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TRANSFER = TransferReport(0.02, 0.01, 4096, 3, "loopback")


@pytest.fixture
def prefill() -> ScriptedWorker:
    return ScriptedWorker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    """What a test started has ended with it."""
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not [task for task in left if "link" in task.get_name() or "sweep" in task.get_name()]


async def test_both_workers_get_the_request_at_once_and_the_answer_is_one(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            assert tuple(to_prefill.prompt_token_ids) == tuple(to_decode.prompt_token_ids) == PROMPT
            assert to_prefill.request_id == to_decode.request_id == "r1"
            assert to_prefill.sampling == to_decode.sampling
            assert to_prefill.prefill.transfer_id == to_decode.decode.transfer_id != ""
            assert to_decode.decode.producer_addresses == ["kv-p"]
            assert to_decode.decode.producer_instance_id == "e1"
            assert 0 < to_decode.deadline_s <= 600
            member = stack.member(decode)
            assert member.reserved_blocks == 3, "40 + 8 tokens in blocks of 16"
            assert stack.member(prefill).outstanding_tokens == 40

            prefill.send(to_prefill, 7, finish=LENGTH)
            first = await anext(answer)
            assert first == AnswerDelta((7,), "<7>")
            assert stack.member(prefill).outstanding_tokens == 0
            decode.send(to_decode, 8)
            assert await anext(answer) == AnswerDelta((8,), "<8>")
            decode.send(to_decode, 9, finish=STOP, transfer=TRANSFER, stop_reason="x")
            last = await read(answer)
        assert (last.token_ids, last.finish_reason, last.stop_reason) == ((9,), STOP, "x")
        assert last.usage == Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=4)
        receipt = last.receipt
        assert receipt is not None
        assert (receipt.prefill_worker, receipt.decode_worker) == ("p", "d")
        assert receipt.first_token_source == "prefill"
        assert (receipt.prefill_s, receipt.decode_s) == (1.0, 1.5)
        assert (receipt.transfer_s, receipt.exposed_transfer_s) == (0.02, 0.01)
        assert (receipt.transfer_bytes, receipt.transfer_blocks) == (4096, 3)
        assert (receipt.transport, receipt.fallbacks) == ("loopback", ())
        assert receipt.queue_s >= 0.25


async def test_early_tokens_of_decode_come_after_the_first(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(request()) as answer,
    ):
        decode.send(await decode.submitted(), 8, 9, finish=LENGTH)
        prefill.send(await prefill.submitted(), 7, finish=LENGTH)
        assert (await read(answer)).token_ids == (7, 8, 9)


async def test_a_request_leaves_nothing_to_the_collector(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    gc.disable()
    try:
        async with running_stack(prefill, decode) as stack, asyncio.timeout(WAIT_S):
            async with stack.coordinator.generate(request()) as answer:
                (flight,) = map(weakref.ref, stack.coordinator._flights)
                prefill.send(await prefill.submitted(), 7, finish=LENGTH)
                decode.send(await decode.submitted(), 8, 9, finish=LENGTH)
                await read(answer)
            while flight() is not None:  # noqa: ASYNC110 - nobody is told when it goes
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_an_answer_that_ends_at_the_first_token_cancels_decode(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(request()) as answer,
    ):
        submit = await decode.submitted()
        prefill.send(await prefill.submitted(), 7, finish=STOP)
        last = await read(answer)
        assert (last.token_ids, last.finish_reason) == ((7,), STOP)
        assert last.receipt is not None
        assert last.receipt.decode_worker == ""
        assert await decode.cancelled() == submit.stream_id
        assert not stack.fleet.open_streams


async def test_one_token_is_made_by_the_prefill_worker_alone(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        one = request(sampling=SamplingParams(max_tokens=1))
        async with stack.coordinator.generate(one) as answer:
            submit = await prefill.submitted()
            assert submit.WhichOneof("phase") == "aggregated"
            prefill.send(submit, 7, finish=LENGTH)
            last = await read(answer)
        assert (last.token_ids, last.finish_reason) == ((7,), LENGTH)
        assert last.receipt is not None
        assert last.receipt.first_token_source == "prefill"
        assert (last.receipt.decode_worker, last.receipt.transfer_bytes) == ("", 0)
        assert not decode.has_submissions


async def test_an_aggregated_worker_does_both() -> None:
    aggregated = ScriptedWorker("a", Role.AGGREGATED)
    async with running_stack(aggregated) as stack:
        async with stack.coordinator.generate(request()) as answer:
            submit = await aggregated.submitted()
            assert submit.WhichOneof("phase") == "aggregated"
            assert stack.member(aggregated).outstanding_tokens == 40
            aggregated.send(submit, 7)
            await anext(answer)
            assert stack.member(aggregated).outstanding_tokens == 0
            aggregated.send(submit, 8, finish=LENGTH)
            last = await read(answer)
        assert last.receipt is not None
        assert (last.receipt.prefill_worker, last.receipt.decode_worker) == ("a", "a")
        assert last.receipt.first_token_source == "aggregated"


async def test_a_failed_transfer_is_tried_again_without_repeating_a_token(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            first = await prefill.submitted()
            prefill.send(first, 7, finish=LENGTH)
            decode.fail(await decode.submitted(), TransferFailed("no blocks"))
            second, again = await prefill.submitted(), await decode.submitted()
            assert list(second.resume_token_ids) == list(again.resume_token_ids) == [7]
            assert second.prefill.transfer_id == again.decode.transfer_id
            assert second.prefill.transfer_id != first.prefill.transfer_id
            prefill.send(second, 8, finish=LENGTH)
            decode.send(again, 9, finish=STOP)
            last = await read(answer)
        assert last.token_ids == (7, 8, 9)
        assert last.usage == Usage(40, 3, 4), "each token counts once"
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("same_prefill:transfer_failed",)
        text = stack.coordinator.metrics.render().decode()
        assert (
            'pdserve_fallbacks_total{model="demo",reason="transfer_failed",step="same_prefill"} 1.0'
            in text
        )
        assert 'pdserve_requests_total{model="demo",outcome="stop"} 1.0' in text


async def test_prefill_that_fails_is_tried_again_under_a_new_transfer(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    other = ScriptedWorker("p2", Role.PREFILL)
    async with running_stack(prefill, decode, other) as stack:
        async with stack.coordinator.generate(request()) as answer:
            first, held = await prefill.submitted(), await decode.submitted()
            prefill.fail(first, WorkerFailed("out of memory"))
            assert await decode.cancelled() == held.stream_id
            second, again = await other.submitted(), await decode.submitted()
            assert second.prefill.transfer_id == again.decode.transfer_id
            assert second.prefill.transfer_id != first.prefill.transfer_id
            assert again.decode.producer_addresses == ["kv-p2"]
            other.send(second, 7, finish=LENGTH)
            decode.send(again, 8, finish=STOP)
            last = await read(answer)
        assert last.token_ids == (7, 8)
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("other_prefill:worker_failed",)
        assert last.receipt.prefill_worker == "p2"


async def test_a_decode_worker_that_breaks_off_is_replaced_mid_answer(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    other = ScriptedWorker("d2", Role.DECODE)
    async with running_stack(prefill, decode, other) as stack:
        async with stack.coordinator.generate(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            assert (await anext(answer)).token_ids == (7,)
            decode.send(await decode.submitted(), 8)
            assert (await anext(answer)).token_ids == (8,)
            decode.break_link()
            first, again = await prefill.submitted(), await other.submitted()
            assert list(first.resume_token_ids) == list(again.resume_token_ids) == [7, 8]
            prefill.send(first, 9, finish=LENGTH)
            other.send(again, 10, finish=STOP)
            last = await read(answer)
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("same_prefill:worker_failed",)
        assert last.receipt.decode_worker == "d2"
        assert last.usage == Usage(40, 4, 4)
        await stack.until_state(decode, "ready")


async def test_without_a_decode_worker_a_prefill_worker_goes_on(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            await decode.submitted()
            assert (await anext(answer)).token_ids == (7,)
            stack.fleet.deregister("d", "e1")
            again = await prefill.submitted()
            prefill.send(again, 8, finish=STOP)
            last = await read(answer)
        assert last.receipt is not None
        assert (last.token_ids, last.receipt.decode_worker) == ((8,), "p")


async def test_when_nobody_is_left_the_answer_ends_with_an_error(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(request()) as answer,
    ):
        await prefill.submitted()
        await decode.submitted()
        stack.fleet.deregister("d", "e1")
        stack.fleet.deregister("p", "e1")
        with pytest.raises(Unavailable, match="no worker is ready for model demo"):
            await anext(answer)


async def test_what_an_engine_refuses_reaches_the_client(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(request()) as answer,
    ):
        await decode.submitted()
        prefill.fail(await prefill.submitted(), InvalidRequest("no such grammar", field="g"))
        with pytest.raises(InvalidRequest, match="no such grammar"):
            await anext(answer)


async def test_what_is_beyond_the_budget_fails_with_the_reason(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    """There are 30 tokens, of which 41 are taken; nobody waits for more at this rate."""
    fallback = FallbackConfig(tokens_per_s=0.001, burst_s=30_000)
    async with running_stack(prefill, decode, fallback=fallback) as stack:
        async with stack.coordinator.generate(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            decode.fail(await decode.submitted(), TransferFailed("no blocks"))
            prefill.send(await prefill.submitted(), 8, finish=LENGTH)
            again = await decode.submitted()
            assert (await anext(answer)).token_ids == (7,)
            assert (await anext(answer)).token_ids == (8,)
            decode.fail(again, TransferFailed("no blocks"))
            with pytest.raises(BudgetExhausted, match=r"\(0\.001 tokens/s\)") as caught:
                await anext(answer)
            assert caught.value.retry_after_s > 1000
        text = stack.coordinator.metrics.render().decode()
        assert 'reason="retry_budget_exhausted",step="error"} 1.0' in text
