"""KV that comes damaged: another pair, or a recompute, and the pair is kept apart for a while."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import TransferCorrupted
from pdserve.types import FinishReason, Role, TransferReport
from pdserve.v1 import worker_pb2 as w
from router.registry import Registry
from tests.fakes import ScriptedWorker, Stack, running_stack
from tests.unit.router.asking import read, request

if TYPE_CHECKING:
    from router.answer import AnswerDelta

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
WHOLE = TransferReport(0.02, 0.01, 4096, 3, "loopback")
CORRUPTED = TransferCorrupted("blocks 0+3 came damaged, and so did what came again")
QUARANTINE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prefill() -> ScriptedWorker:
    return ScriptedWorker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


async def corrupted(stack: Stack, prefill: ScriptedWorker, decode: ScriptedWorker) -> AnswerDelta:
    """One pair there is: its KV comes damaged, and decode recomputes."""
    async with stack.coordinator.generate(request()) as answer:
        prefill.send(await prefill.submitted(), 7, finish=LENGTH)
        decode.fail(await decode.submitted(), CORRUPTED)
        again = await decode.submitted()
        assert again.WhichOneof("phase") == "aggregated"
        assert list(again.resume_token_ids) == [7]
        decode.send(again, 8, finish=STOP)
        return await read(answer)


async def paired(stack: Stack, prefill: ScriptedWorker, decode: ScriptedWorker) -> AnswerDelta:
    """A request that both workers serve."""
    async with stack.coordinator.generate(request()) as answer:
        prefill.send(await prefill.submitted(), 7, finish=LENGTH)
        decode.send(await decode.submitted(), 8, finish=STOP, transfer=WHOLE)
        return await read(answer)


async def alone(stack: Stack, decode: ScriptedWorker) -> AnswerDelta:
    """A request that the decode worker serves by itself."""
    async with stack.coordinator.generate(request()) as answer:
        submit = await decode.submitted()
        assert submit.WhichOneof("phase") == "aggregated"
        decode.send(submit, 7, 8, finish=STOP)
        return await read(answer)


def gauge(stack: Stack) -> str:
    text = stack.coordinator.metrics.render().decode()
    (line,) = [x for x in text.splitlines() if x.startswith("pdserve_kv_quarantined_pairs ")]
    return line.split()[1]


async def test_another_prefill_worker_goes_on_after_the_first_token(
    prefill: ScriptedWorker, decode: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    other = ScriptedWorker("p2", Role.PREFILL)
    async with running_stack(prefill, other, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            first = await decode.submitted()
            decode.fail(first, CORRUPTED)
            second, again = await other.submitted(), await decode.submitted()
            assert list(second.resume_token_ids) == list(again.resume_token_ids) == [7]
            assert second.prefill.transfer_id == again.decode.transfer_id
            assert again.decode.transfer_id != first.decode.transfer_id
            assert again.decode.producer_addresses == ["kv-p2"]
            # Whatever the decode worker has to say waits for the second prefill's token.
            decode.send(again, 9, finish=STOP, transfer=WHOLE)
            other.send(second, 8, finish=LENGTH)
            last = await read(answer)
        assert last.token_ids == (7, 8, 9)
        assert last.text == "<7><8><9>"
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("other_prefill:transfer_corrupted",)
        assert last.receipt.prefill_worker == "p"
        assert last.receipt.transport == "loopback"
        assert stack.fleet.quarantine.barred(stack.fleet.now()) == {("p", "d")}
        assert "KV from worker p to d: blocks 0+3 came damaged" in caplog.text
        text = stack.coordinator.metrics.render().decode()
        assert 'reason="transfer_corrupted",step="other_prefill"} 1.0' in text


async def test_without_another_pair_the_decode_worker_recomputes(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        last = await corrupted(stack, prefill, decode)
        assert last.token_ids == (7, 8)
        assert last.receipt is not None
        assert last.receipt.fallbacks == ("one_worker:transfer_corrupted",)
        assert last.receipt.decode_worker == "d"


async def test_a_pair_stays_apart_until_one_request_has_tried_it(
    prefill: ScriptedWorker, decode: ScriptedWorker, clock: Clock
) -> None:
    async with running_stack(prefill, decode, clock=clock) as stack:
        await corrupted(stack, prefill, decode)
        assert gauge(stack) == "1.0"
        clock.now = QUARANTINE_S - 1
        last = await alone(stack, decode)
        assert last.receipt is not None
        assert last.receipt.fallbacks == ()

        clock.now = QUARANTINE_S
        async with stack.coordinator.generate(request()) as trial:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            assert to_decode.WhichOneof("phase") == "decode"
            # While it tries, nobody else does.
            await alone(stack, decode)
            prefill.send(to_prefill, 7, finish=LENGTH)
            decode.send(to_decode, 8, finish=STOP, transfer=WHOLE)
            await read(trial)
        assert gauge(stack) == "0.0"
        await paired(stack, prefill, decode)
        assert not prefill.has_submissions


async def test_a_trial_that_fails_keeps_the_pair_apart(
    prefill: ScriptedWorker, decode: ScriptedWorker, clock: Clock
) -> None:
    async with running_stack(prefill, decode, clock=clock) as stack:
        await corrupted(stack, prefill, decode)
        clock.now = QUARANTINE_S
        await corrupted(stack, prefill, decode)
        clock.now = 2 * QUARANTINE_S - 1
        await alone(stack, decode)
        listed = (
            await Registry(stack.fleet).ListWorkers(w.ListWorkersRequest(), None)
        ).ejected_pairs  # type: ignore[arg-type]
        assert list(listed) == [
            w.EjectedPair(
                prefill_worker="p",
                decode_worker="d",
                remaining_s=1.0,
                failures=2,
                reason=CORRUPTED.message,
            )
        ]


async def test_a_request_that_was_under_way_already_does_not_open_the_pair(
    prefill: ScriptedWorker, decode: ScriptedWorker, clock: Clock
) -> None:
    async with running_stack(prefill, decode, clock=clock) as stack:
        async with stack.coordinator.generate(request()) as earlier:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            await corrupted(stack, prefill, decode)
            prefill.send(to_prefill, 7, finish=LENGTH)
            decode.send(to_decode, 8, finish=STOP, transfer=WHOLE)
            await read(earlier)
        assert gauge(stack) == "1.0"
        await alone(stack, decode)


async def test_the_last_rung_still_strikes(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    """Damaged twice over two pairs: both are kept apart, and the answer is recomputed."""
    other = ScriptedWorker("p2", Role.PREFILL)
    async with running_stack(prefill, other, decode) as stack:
        async with stack.coordinator.generate(request()) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            decode.fail(await decode.submitted(), CORRUPTED)
            other.send(await other.submitted(), 8, finish=LENGTH)
            decode.fail(await decode.submitted(), CORRUPTED)
            again = await decode.submitted()
            assert again.WhichOneof("phase") == "aggregated"
            assert list(again.resume_token_ids) == [7, 8]
            decode.send(again, 9, finish=STOP)
            last = await read(answer)
        assert last.token_ids == (7, 8, 9)
        assert last.receipt is not None
        assert last.receipt.fallbacks == (
            "other_prefill:transfer_corrupted",
            "one_worker:transfer_corrupted",
        )
        assert gauge(stack) == "2.0"
