"""The promises of workers/engine.py as tests. A test module makes them its own by subclassing:
`EngineContract` needs the fixture `driver`, `HandoffContract` the fixtures `driver` and `pair`.

Engines may be shared between tests, so no test leaves anything behind, and none of them asks what
the tokens are: only that they are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.types import FinishReason, SamplingParams
from tests.unit.workers.engine_driver import PLAIN, prompt
from workers.engine import DecodePhase

if TYPE_CHECKING:
    from tests.unit.workers.engine_driver import EngineDriver, Pair, Stream

LONG = replace(PLAIN, max_tokens=64)
SAMPLED = replace(PLAIN, temperature=0.9, seed=7)


def assert_ended_once(stream: Stream) -> None:
    finishes = [d.finish_reason is not None for d in stream.deltas]
    assert finishes == [False] * (len(finishes) - 1) + [True]


def first_with_text(stream: Stream, *, after: int) -> str:
    """A piece of the answer that begins behind its first `after` tokens, to stop at."""
    head = "".join(d.text for d in stream.deltas[:after])
    return stream.text[len(head) : len(head) + 3]


class EngineContract:
    """One engine that prefills and decodes."""

    async def test_an_answer_ends_once_with_max_tokens_and_a_report(
        self, driver: EngineDriver
    ) -> None:
        stream = await driver.run(prompt(20))
        assert_ended_once(stream)
        assert len(stream.token_ids) == PLAIN.max_tokens
        assert stream.last.finish_reason is FinishReason.LENGTH
        assert stream.last.report is not None
        assert stream.text
        await driver.until_empty()

    @pytest.mark.parametrize("sampling", [PLAIN, SAMPLED], ids=["greedy", "seeded"])
    async def test_the_same_request_gives_the_same_answer(
        self, driver: EngineDriver, sampling: SamplingParams
    ) -> None:
        one, two = await driver.run(prompt(33), sampling), await driver.run(prompt(33), sampling)
        assert one.token_ids == two.token_ids
        assert one.text == two.text

    async def test_requests_side_by_side_come_in_one_call_a_step(
        self, driver: EngineDriver
    ) -> None:
        ids = [driver.submit(prompt(10, start=i), LONG) for i in range(3)]
        streams = [await driver.finish(i) for i in ids]
        for stream in streams:
            assert_ended_once(stream)
            assert len(stream.token_ids) == LONG.max_tokens
        assert any({d.stream_id for d in step} == set(ids) for step in driver.steps)
        for step in driver.steps:
            assert len({d.stream_id for d in step}) == len(step)

    async def test_a_stop_string_ends_the_answer_before_it(self, driver: EngineDriver) -> None:
        whole = await driver.run(prompt(20), LONG)
        stop = first_with_text(whole, after=8)
        stream = await driver.run(prompt(20), replace(LONG, stop=(stop,)))
        assert stream.last.finish_reason is FinishReason.STOP
        assert stream.last.stop_reason == stop
        assert stream.text == whole.text[: whole.text.index(stop)]

    async def test_a_stop_token_ends_the_answer(self, driver: EngineDriver) -> None:
        whole = await driver.run(prompt(20), LONG)
        token = whole.token_ids[5]
        stream = await driver.run(prompt(20), replace(LONG, stop_token_ids=(token,)))
        assert stream.last.finish_reason is FinishReason.STOP
        assert stream.last.stop_reason == token
        assert stream.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]

    async def test_no_stop_before_min_tokens(self, driver: EngineDriver) -> None:
        whole = await driver.run(prompt(20), LONG)
        sampling = replace(LONG, stop_token_ids=(whole.token_ids[2],), min_tokens=10)
        stream = await driver.run(prompt(20), sampling)
        assert len(stream.token_ids) >= 10
        assert whole.token_ids[2] not in stream.token_ids[:10]

    async def test_logprobs_come_with_each_token(self, driver: EngineDriver) -> None:
        stream = await driver.run(prompt(20), replace(PLAIN, logprobs=3))
        positions = [x for d in stream.deltas for x in d.logprobs]
        assert tuple(x.sampled.token_id for x in positions) == stream.token_ids
        for position in positions:
            assert len(position.top) == 3
            assert [x.rank for x in position.top] == [1, 2, 3]
            assert position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob

    @pytest.mark.parametrize("done", [1, 5, 11])
    @pytest.mark.parametrize("sampling", [PLAIN, SAMPLED], ids=["greedy", "seeded"])
    async def test_a_resumed_answer_goes_on_where_the_other_ended(
        self, driver: EngineDriver, sampling: SamplingParams, done: int
    ) -> None:
        whole = await driver.run(prompt(20), sampling)
        resumed = await driver.run(prompt(20), sampling, resume=whole.token_ids[:done])
        assert resumed.token_ids == whole.token_ids[done:]
        assert whole.text.endswith(resumed.text)

    async def test_a_stop_string_is_found_across_the_seam_of_a_resumed_answer(
        self, driver: EngineDriver
    ) -> None:
        whole = await driver.run(prompt(20), LONG)
        stop = first_with_text(whole, after=8)
        sampling = replace(LONG, stop=(stop,))
        ended = await driver.run(prompt(20), sampling)
        for done in range(1, len(ended.token_ids)):
            resumed = await driver.run(prompt(20), sampling, resume=whole.token_ids[:done])
            assert resumed.token_ids == ended.token_ids[done:]
            assert ended.text.endswith(resumed.text)
            assert resumed.last.stop_reason == stop

    @pytest.mark.parametrize(
        ("token_ids", "field"), [((), "prompt_token_ids"), ((20, 1 << 30), "prompt_token_ids")]
    )
    async def test_a_bad_prompt_ends_with_an_error_that_names_the_field(
        self, driver: EngineDriver, token_ids: tuple[int, ...], field: str
    ) -> None:
        stream = await driver.run(token_ids)
        assert_ended_once(stream)
        assert stream.last.finish_reason is FinishReason.ERROR
        assert stream.error.field == field
        await driver.until_empty()

    async def test_a_request_over_the_context_is_refused(self, driver: EngineDriver) -> None:
        sampling = replace(PLAIN, max_tokens=driver.info.model.max_model_len)
        stream = await driver.run(prompt(20), sampling)
        assert stream.error.code == "context_length_exceeded"
        assert not stream.token_ids

    async def test_cancel_frees_everything_and_the_next_request_is_served(
        self, driver: EngineDriver
    ) -> None:
        stream_id = driver.submit(prompt(20), replace(PLAIN, max_tokens=1000))
        await driver.until(lambda: driver.streams[stream_id].deltas)
        driver.engine.cancel(stream_id)
        driver.engine.cancel(stream_id)
        await driver.until_empty()
        stream = await driver.run(prompt(20))
        assert len(stream.token_ids) == PLAIN.max_tokens

    async def test_cancel_of_an_unknown_stream_is_nothing(self, driver: EngineDriver) -> None:
        driver.engine.cancel(1 << 40)
        assert (await driver.run(prompt(5))).is_finished


class HandoffContract:
    """A prefill engine and a decode engine against one that does both."""

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
    @pytest.mark.parametrize("sampling", [PLAIN, SAMPLED], ids=["greedy", "seeded"])
    async def test_both_phases_apart_give_the_answer_of_one_engine(
        self, driver: EngineDriver, pair: Pair, sampling: SamplingParams, length: int
    ) -> None:
        whole = await driver.run(prompt(length), sampling)
        apart = await pair.run(prompt(length), sampling)
        assert apart.token_ids == whole.token_ids
        assert apart.text == whole.text
        await pair.until_empty()

    async def test_prefill_says_one_token_and_decode_the_others(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        first = await pair.prefill.run(prompt(20), PLAIN, prefill_phase)
        rest = await pair.decode.finish(decoding)
        assert_ended_once(first)
        assert_ended_once(rest)
        assert len(first.token_ids) == 1
        assert first.last.finish_reason is FinishReason.LENGTH
        assert len(rest.token_ids) == PLAIN.max_tokens - 1
        assert rest.last.report is not None
        assert rest.last.report.transfer is not None
        assert rest.last.report.transfer.blocks > 0
        await pair.until_empty()

    async def test_prefill_may_end_before_decode_asks(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        prefill_phase, decode_phase = pair.phases()
        await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        await pair.prefill.until(lambda: pair.prefill.engine.ledger().leased_blocks)
        ledger = pair.prefill.engine.ledger()
        assert ledger.pinned_blocks == ledger.leased_blocks
        rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
        assert rest.token_ids == (await driver.run(prompt(40))).token_ids[1:]
        await pair.until_empty()

    async def test_a_first_token_that_ends_the_answer_holds_nothing(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        token = (await driver.run(prompt(20))).token_ids[0]
        prefill_phase, _ = pair.phases()
        sampling = replace(PLAIN, stop_token_ids=(token,))
        first = await pair.prefill.run(prompt(20), sampling, prefill_phase)
        assert first.last.finish_reason is FinishReason.STOP
        await pair.until_empty()

    async def test_a_stop_string_is_found_across_the_handoff(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        whole = await driver.run(prompt(20), LONG)
        sampling = replace(LONG, stop=(whole.text[1:4],))
        one, apart = await driver.run(prompt(20), sampling), await pair.run(prompt(20), sampling)
        assert apart.token_ids == one.token_ids
        assert apart.text == one.text
        assert apart.last.stop_reason == sampling.stop[0]
        await pair.until_empty()

    async def test_a_resumed_answer_can_be_handed_over_again(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        whole = await driver.run(prompt(20), SAMPLED)
        apart = await pair.run(prompt(20), SAMPLED, resume=whole.token_ids[:4])
        assert apart.token_ids == whole.token_ids[4:]
        assert whole.text.endswith(apart.text)
        await pair.until_empty()

    async def test_a_stale_instance_id_fails_the_transfer_and_makes_no_token(
        self, pair: Pair
    ) -> None:
        prefill_phase, decode_phase = pair.phases(instance_id="of-another-life")
        prefilling = pair.prefill.submit(prompt(20), PLAIN, prefill_phase)
        rest = await pair.decode.run(prompt(20), PLAIN, decode_phase)
        assert rest.error.code == "transfer_failed"
        assert not rest.token_ids
        await pair.prefill.finish(prefilling)
        pair.prefill.engine.cancel(prefilling)
        await pair.until_empty()

    async def test_nobody_at_the_address_fails_the_transfer(self, pair: Pair) -> None:
        phase = DecodePhase("no-one", ("127.0.0.1:1",), pair.producer_instance_id)
        rest = await pair.decode.run(prompt(20), PLAIN, phase)
        assert rest.error.code == "transfer_failed"
        assert not rest.token_ids
        await pair.until_empty()

    async def test_cancelled_decode_frees_the_blocks_of_the_prefill(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(40), PLAIN, decode_phase)
        await pair.decode.until(lambda: pair.decode.engine.ledger().in_flight_blocks)
        pair.decode.engine.cancel(decoding)
        first = await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        assert_ended_once(first)
        # What is left of a transfer that nobody asks for any more, its owner cancels.
        pair.prefill.engine.cancel(next(reversed(pair.prefill.streams)))
        await pair.until_empty()

    async def test_cancelled_prefill_fails_the_decode(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        prefilling = pair.prefill.submit(prompt(40), PLAIN, prefill_phase)
        await pair.prefill.finish(prefilling)
        pair.prefill.engine.cancel(prefilling)
        await pair.prefill.until_empty()
        rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
        assert rest.error.code == "transfer_failed"
        assert not rest.token_ids
        await pair.until_empty()

    @pytest.mark.parametrize("sampling", [LONG, replace(LONG, seed=7)], ids=["greedy", "seeded"])
    async def test_an_exported_stream_goes_on_elsewhere_from_its_kv(
        self, pair: Pair, sampling: SamplingParams
    ) -> None:
        """From one engine to the other, and what is said in between is said once."""
        whole = await pair.prefill.run(prompt(33), sampling)
        head, phase = await pair.exported(prompt(33), sampling, tokens=5)
        assert head.last.exported_tokens == len(head.token_ids) >= 5
        assert head.last.finish_reason is FinishReason.ABORT
        assert not head.last.token_ids
        assert pair.prefill.engine.ledger().leased_blocks
        tail = await pair.decode.run(prompt(33), sampling, phase, resume=head.token_ids)
        assert (*head.token_ids, *tail.token_ids) == whole.token_ids
        assert head.text + tail.text == whole.text
        assert tail.last.report is not None
        assert tail.last.report.transfer is not None
        assert not tail.last.report.prefill_s
        await pair.until_empty()

    async def test_an_export_that_nobody_wants_any_more_frees_its_blocks(self, pair: Pair) -> None:
        await pair.exported(prompt(33), LONG, tokens=5)
        (stream_id,) = pair.prefill.streams
        pair.prefill.engine.cancel(stream_id)
        await pair.until_empty()

    async def test_a_stream_that_has_no_kv_yet_is_not_exported(self, pair: Pair) -> None:
        """Its prompt is not computed: it ends, for its router to submit it elsewhere."""
        stream_id = pair.prefill.submit(prompt(33), LONG)
        pair.prefill.engine.export(stream_id, "early")
        pair.prefill.engine.export(stream_id, "early")
        pair.prefill.engine.export(99, "unknown")
        stream = await pair.prefill.finish(stream_id)
        assert_ended_once(stream)
        assert stream.error.code == "unavailable"
        await pair.until_empty()
