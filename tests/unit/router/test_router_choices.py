"""Several answers to one prompt: one prefill, one transfer, forks at the decode worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import DeadlineExceeded, TransferFailed, WorkerFailed
from pdserve.types import FinishReason, Role, SamplingParams, TransferReport, Usage
from pdserve.v1 import worker_pb2 as w
from router.answer import AnswerDelta, BufferLimits
from router.decisions.log import DecisionLog
from tests.fakes import ScriptedWorker, running_stack
from tests.patience import WAIT_S
from tests.unit.router.asking import request

if TYPE_CHECKING:
    from router.answer import AnswerStream

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TRANSFER = TransferReport(0.02, 0.01, 4096, 3, "loopback")
THREE = request(sampling=SamplingParams(max_tokens=8, n=3, seed=5, temperature=1.0))


@pytest.fixture
def prefill() -> ScriptedWorker:
    return ScriptedWorker("p", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedWorker:
    return ScriptedWorker("d", Role.DECODE)


def forks_of(submit: w.Submit) -> list[w.Submit]:
    """Its forks, as streams that a scripted worker can speak on."""
    return [w.Submit(stream_id=fork.stream_id) for fork in submit.forks]


async def read_all(answer: AnswerStream) -> tuple[dict[int, list[int]], list[AnswerDelta]]:
    deltas = [delta async for delta in answer]
    tokens: dict[int, list[int]] = {}
    for delta in deltas:
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens, deltas


async def test_one_prefill_one_transfer_and_forks_with_seeds_of_their_own(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            assert not to_prefill.forks
            assert (to_prefill.sampling.HasField("n"), to_prefill.sampling.seed) == (False, 5)
            assert [fork.seed for fork in to_decode.forks] == [6, 7]
            # 48 tokens in blocks of 16; a fork shares two, and has the last 8 of the prompt.
            assert stack.member(decode).reserved_blocks == 3 + 2 * 1
            assert stack.member(decode).outstanding_requests == 3
            one, two = forks_of(to_decode)
            prefill.send(to_prefill, 7, finish=LENGTH)
            decode.send(to_decode, 8)
            decode.send(one, 17)
            decode.send(two, 27)
            decode.send(one, 18, finish=STOP, stop_reason="x")
            decode.send(to_decode, 9, finish=LENGTH, transfer=TRANSFER)
            decode.send(two, 28, finish=LENGTH)
            tokens, deltas = await read_all(answer)
        assert tokens == {0: [7, 8, 9], 1: [17, 18], 2: [27, 28]}
        ends = {d.index: (d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason}
        assert ends == {0: (LENGTH, None), 1: (STOP, "x"), 2: (LENGTH, None)}
        assert [d.usage for d in deltas if d.usage] == [deltas[-1].usage] == [Usage(40, 7, 4)]
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert (receipt.prefill_worker, receipt.decode_worker) == ("p", "d")
        assert (receipt.transfer_bytes, receipt.fallbacks) == (4096, ())
        text = stack.coordinator.metrics.render().decode()
        assert 'pdserve_requests_total{model="demo",outcome="length"} 1.0' in text
        assert 'pdserve_prompt_tokens_total{model="demo"} 40.0' in text
        assert 'pdserve_generation_tokens_total{model="demo"} 7.0' in text


async def test_room_is_kept_for_all_answers_before_any_work(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    many = request(sampling=SamplingParams(max_tokens=200, n=8))
    async with (
        running_stack(prefill, decode) as stack,
        stack.coordinator.generate(many) as answer,
    ):
        submit = await decode.submitted()
        assert not any(fork.HasField("seed") for fork in submit.forks)
        # 240 tokens are 15 blocks, and those of a fork, 8 + 200, are 13: more than there are.
        assert stack.member(decode).reserved_blocks == 15 + 7 * 12
        prefill.send(await prefill.submitted(), 7, finish=LENGTH)
        await anext(answer)


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
async def test_one_worker_that_does_it_all_forks_too(role: Role) -> None:
    worker = ScriptedWorker("a", role)
    most = 1 if role is Role.PREFILL else 8
    async with running_stack(worker) as stack:
        asked = request(sampling=SamplingParams(max_tokens=most, n=2))
        async with stack.coordinator.generate(asked) as answer:
            submit = await worker.submitted()
            assert submit.WhichOneof("phase") == "aggregated"
            worker.send(submit, 7, finish=LENGTH)
            worker.send(forks_of(submit)[0], 17, finish=LENGTH)
            tokens, deltas = await read_all(answer)
        assert tokens == {0: [7], 1: [17]}
        assert deltas[-1].usage == Usage(40, 2, 4)
        assert not worker.has_submissions


async def test_where_the_first_token_is_the_last_the_next_answer_leads(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    log = DecisionLog(16)
    async with running_stack(prefill, decode, decisions=log) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            before = await decode.submitted()
            prefill.send(await prefill.submitted(), 7, finish=STOP)
            second, to_decode = await prefill.submitted(), await decode.submitted()
            assert {await decode.cancelled() for _ in range(3)} == {
                before.stream_id,
                *(fork.stream_id for fork in before.forks),
            }
            assert (second.sampling.seed, [x.seed for x in to_decode.forks]) == (6, [7])
            prefill.send(second, 17, finish=STOP)
            third, to_decode = await prefill.submitted(), await decode.submitted()
            assert (third.sampling.seed, len(to_decode.forks)) == (7, 0)
            prefill.send(third, 27, finish=LENGTH)
            decode.send(to_decode, 28, finish=STOP, transfer=TRANSFER)
            tokens, deltas = await read_all(answer)
        assert tokens == {0: [7], 1: [17], 2: [27, 28]}
        assert deltas[-1].usage == Usage(40, 4, 4)
        assert deltas[-1].receipt is not None
        assert deltas[-1].receipt.fallbacks == ()
    placed = log.of(THREE.request_id)
    assert placed is not None
    assert [x.cause for x in placed.decisions] == [
        "",
        "answer 0 ended with prefill's token, so that its KV went nowhere",
        "answer 1 ended with prefill's token, so that its KV went nowhere",
    ]


async def test_forks_that_have_not_begun_go_where_their_leader_goes(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    other = ScriptedWorker("d2", Role.DECODE)
    async with running_stack(prefill, decode, other) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            to_prefill = await prefill.submitted()
            first, second = (
                (decode, other) if stack.member(decode).outstanding_requests else (other, decode)
            )
            submit = await first.submitted()
            # The forks' failures come first, and wait for what becomes of the leader.
            for fork in forks_of(submit):
                first.fail(fork, TransferFailed("no leader"))
            first.fail(submit, WorkerFailed("out of memory"))
            prefill.send(to_prefill, 7, finish=LENGTH)
            again = await (await _next_of(first, second)).submitted()
            assert [fork.seed for fork in again.forks] == [6, 7]
            assert list(again.resume_token_ids) == [7]
            worker = first if again.stream_id in first.open else second
            if again.WhichOneof("phase") == "decode":
                prefill.send(await prefill.submitted(), 8, finish=LENGTH)
            one, two = forks_of(again)
            worker.send(again, 9, finish=STOP)
            worker.send(one, 17, finish=STOP)
            worker.send(two, 27, finish=STOP)
            tokens, deltas = await read_all(answer)
        assert (tokens[1], tokens[2]) == ([17], [27])
        assert deltas[-1].receipt is not None
        assert len(deltas[-1].receipt.fallbacks) == 1, "the leader's alone"


async def test_what_fails_a_leader_costs_its_forks_no_rung(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            submit = await decode.submitted()
            attempts = 1
            while submit.WhichOneof("phase") == "decode":
                for fork in forks_of(submit):
                    decode.fail(fork, TransferFailed("no leader"))
                decode.fail(submit, TransferFailed("broken"))
                prefill.send(await prefill.submitted(), attempts, finish=LENGTH)
                submit = await decode.submitted()
                attempts += 1
            assert attempts == 4
            one, two = forks_of(submit)
            decode.send(submit, 9, finish=STOP)
            decode.send(one, 17, finish=STOP)
            decode.send(two, 27, finish=STOP)
            tokens, _ = await read_all(answer)
        assert (tokens[0], tokens[1], tokens[2]) == ([1, 2, 3, 9], [17], [27])


async def _next_of(*workers: ScriptedWorker) -> ScriptedWorker:
    """The first of `workers` that has something submitted."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for worker in workers:
                if worker.has_submissions:
                    return worker
            await asyncio.sleep(0.005)


async def test_an_answer_that_has_begun_falls_back_by_itself() -> None:
    one, two = ScriptedWorker("a1", Role.AGGREGATED), ScriptedWorker("a2", Role.AGGREGATED)
    async with running_stack(one, two) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            worker = await _next_of(one, two)
            submit = await worker.submitted()
            first, second = forks_of(submit)
            for stream, token in ((submit, 7), (first, 17), (second, 27)):
                worker.send(stream, token)
            for _ in range(3):
                await anext(answer)
            worker.fail(first, WorkerFailed("lost it"))
            other = await _next_of(one, two)
            again = await other.submitted()
            assert (list(again.resume_token_ids), again.sampling.seed) == ([17], 6)
            assert not again.forks
            worker.send(submit, 8, finish=STOP)
            worker.send(second, 28, finish=STOP)
            other.send(again, 18, finish=STOP)
            tokens, deltas = await read_all(answer)
        assert tokens == {0: [8], 1: [18], 2: [28]}
        assert deltas[-1].receipt is not None
        assert len(deltas[-1].receipt.fallbacks) == 1
        assert deltas[-1].usage == Usage(40, 6, 4)


@pytest.mark.parametrize("when", ["at once", "after the first token", "in the middle"])
async def test_a_client_that_leaves_cancels_all(
    prefill: ScriptedWorker, decode: ScriptedWorker, when: str
) -> None:
    async with running_stack(prefill, decode) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            to_prefill, to_decode = await prefill.submitted(), await decode.submitted()
            if when != "at once":
                prefill.send(to_prefill, 7, finish=LENGTH)
                await anext(answer)
            if when == "in the middle":
                for stream in (to_decode, *forks_of(to_decode)):
                    decode.send(stream, 8)
                    await anext(answer)
        stack.assert_no_leaks()
        ids = {await decode.cancelled() for _ in range(3)}
        assert ids == {to_decode.stream_id, *(fork.stream_id for fork in to_decode.forks)}


async def test_a_slow_reader_and_a_deadline_end_all(
    prefill: ScriptedWorker, decode: ScriptedWorker
) -> None:
    limits = BufferLimits(tokens=4)
    async with running_stack(prefill, decode, buffer_limits=limits) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            prefill.send(await prefill.submitted(), 7, finish=LENGTH)
            submit = await decode.submitted()
            decode.send(forks_of(submit)[1], 1, 2, 3, 4, 5)
            for _ in range(3):
                await decode.cancelled()
            with pytest.raises(Exception, match="does not read"):
                await read_all(answer)
        assert not stack.fleet.open_streams
    async with running_stack(prefill, decode, request_timeout_s=0.2) as stack:
        async with stack.coordinator.generate(THREE) as answer:
            with pytest.raises(DeadlineExceeded):
                await read_all(answer)
        assert not stack.fleet.open_streams
