"""Workers whose handoff is in turn: decode is told of a request when its prefill has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.types import FinishReason, HandoffStyle, Role, TransferReport, Usage
from tests.fakes import ScriptedWorker, running_stack
from tests.unit.router.asking import PROMPT, read, request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TRANSFER = TransferReport(0.02, 0.02, 4096, 3, "nixl")
HANDLE = b"where it is"


def worker(worker_id: str, role: Role) -> ScriptedWorker:
    """One that hands over in turn."""
    found = ScriptedWorker(worker_id, role)
    assert found.info.kv is not None
    found.info = replace(found.info, kv=replace(found.info.kv, handoff=HandoffStyle.SEQUENTIAL))
    return found


@pytest.fixture
def prefill() -> ScriptedWorker:
    return worker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return worker("d", Role.DECODE)


async def test_decode_is_told_what_prefill_said_and_goes_on_after_its_token(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            to_prefill = await prefill.submitted()
            assert not decode.has_submissions
            assert stack.member(decode).reserved_blocks == 3, "its room is kept from the start"
            prefill.send(to_prefill, 7, finish=LENGTH, kv_handle=HANDLE)
            assert (await anext(answer)).token_ids == (7,)
            to_decode = await decode.submitted()
            assert tuple(to_decode.prompt_token_ids) == PROMPT
            assert list(to_decode.resume_token_ids) == [7]
            assert to_decode.decode.kv_handle == HANDLE
            assert to_decode.decode.transfer_id == to_prefill.prefill.transfer_id
            assert 0 < to_decode.deadline_s < to_prefill.deadline_s
            decode.send(to_decode, 8, 9, finish=STOP, transfer=TRANSFER)
            last = await read(answer)
        assert last.token_ids == (8, 9)
        assert last.usage == Usage(prompt_tokens=40, completion_tokens=3, cached_tokens=4)
        receipt = last.receipt
        assert receipt is not None
        assert (receipt.prefill_worker, receipt.decode_worker) == ("p", "d")
        assert (receipt.first_token_source, receipt.transport) == ("prefill", "nixl")


async def test_a_client_that_leaves_before_decode_has_its_turn_costs_decode_nothing(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()):
            submit = await prefill.submitted()
        assert await prefill.cancelled() == submit.stream_id
        assert not decode.has_submissions
        assert stack.member(decode).reserved_blocks == 0


async def test_a_client_that_leaves_before_the_kv_came_frees_it(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            submit = await prefill.submitted()
            prefill.send(submit, 7, finish=LENGTH, kv_handle=HANDLE)
            await anext(answer)
            to_decode = await decode.submitted()
        assert await decode.cancelled() == to_decode.stream_id
        assert await prefill.cancelled() == submit.stream_id, "its blocks are held"


async def test_a_decode_worker_that_left_before_its_turn_is_replaced(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    other = worker("d2", Role.DECODE)
    async with (
        running_stack(prefill, decode) as stack,
        other.serving(),
        stack.coordinator.generate(request()) as answer,
    ):
        submit = await prefill.submitted()
        await stack.join(other)
        stack.fleet.deregister("d", "e1")
        prefill.send(submit, 7, finish=LENGTH, kv_handle=HANDLE)
        second = await prefill.submitted()
        assert list(second.resume_token_ids) == [7]
        prefill.send(second, 8, finish=LENGTH, kv_handle=HANDLE)
        again = await other.submitted()
        assert list(again.resume_token_ids) == [7, 8]
        other.send(again, 9, finish=STOP)
        last = await read(answer)
        assert last.token_ids == (7, 8, 9)
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("same_prefill:unavailable",)
