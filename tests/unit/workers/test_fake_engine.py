"""The fake engine keeps the promises of workers/engine.py, and does what it is scripted to do.
tests/e2e tests the promises on vLLM."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.types import FinishReason, ModelInfo, SamplingParams
from tests.unit.workers.engine_driver import PLAIN, EngineDriver, Pair, prompt
from tests.unit.workers.router_side import PATIENT_KV
from workers.engine import DecodePhase
from workers.fake import engine
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeFaults, FakeKv, FakeSettings, settings_from_args

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.workers.engine_driver import Stream

MODEL = ModelInfo(name="fake", path="", max_model_len=4096, vocab_size=512, dtype="none")
LONG = replace(PLAIN, max_tokens=64)
SAMPLED = replace(PLAIN, temperature=0.9, seed=7)
BOTH = pytest.mark.parametrize("sampling", [PLAIN, SAMPLED], ids=["greedy", "seeded"])


def make_driver(settings: FakeSettings | None = None) -> EngineDriver:
    return EngineDriver(FakeEngine(MODEL, settings))


@asynccontextmanager
async def a_pair(**times: Any) -> AsyncIterator[Pair]:
    kv = [FakeKv(x, **{**PATIENT_KV, **times}) for x in ("p1", "d1")]
    prefill, decode = [await make_driver(FakeSettings(kv=x)).start() for x in kv]
    try:
        yield Pair(prefill, decode, "p1")
        await prefill.until_empty()
        await decode.until_empty()
    finally:
        await prefill.close()
        await decode.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A prefill and a decode engine. Each test has to end with no block pinned."""
    async with a_pair() as pair:
        yield pair


@pytest.fixture
async def driver() -> AsyncIterator[EngineDriver]:
    driver = await make_driver().start()
    yield driver
    await driver.close()


@pytest.fixture
async def small() -> AsyncIterator[EngineDriver]:
    driver = await make_driver(FakeSettings(total_blocks=8, max_num_seqs=2)).start()
    yield driver
    await driver.close()


def fake(driver: EngineDriver) -> FakeEngine:
    assert isinstance(driver.engine, FakeEngine)
    return driver.engine


def assert_ended_once(stream: Stream) -> None:
    finishes = [d.finish_reason is not None for d in stream.deltas]
    assert finishes == [False] * (len(finishes) - 1) + [True]


def assert_transfer_failed(stream: Stream, why: str = "") -> None:
    assert stream.error.code == "transfer_failed"
    assert why in stream.error.message
    assert not stream.token_ids


def text_after(stream: Stream, tokens: int) -> str:
    """A piece of the answer that begins after its first `tokens` tokens, to stop at."""
    head = "".join(d.text for d in stream.deltas[:tokens])
    return stream.text[len(head) : len(head) + 3]


class TestOneEngine:
    async def test_answers_come_in_one_call_a_step_and_end_once(self, driver: EngineDriver) -> None:
        ids = [driver.submit(prompt(10, start=i), LONG) for i in range(3)]
        for stream in [await driver.finish(i) for i in ids]:
            assert_ended_once(stream)
            assert len(stream.token_ids) == LONG.max_tokens
            assert stream.last.finish_reason is FinishReason.LENGTH
            assert stream.last.report is not None
            assert stream.text
        assert any({d.stream_id for d in step} == set(ids) for step in driver.steps)
        for step in driver.steps:
            assert len({d.stream_id for d in step}) == len(step)
        await driver.until_empty()

    async def test_a_stop_string_ends_the_answer_before_it(self, driver: EngineDriver) -> None:
        whole = await driver.run(prompt(20), LONG)
        stop = text_after(whole, 8)
        stream = await driver.run(prompt(20), replace(LONG, stop=(stop,)))
        assert stream.last.finish_reason is FinishReason.STOP
        assert stream.last.stop_reason == stop
        assert stream.text == whole.text[: whole.text.index(stop)]

    async def test_a_stop_token_ends_the_answer_but_not_before_min_tokens(
        self, driver: EngineDriver
    ) -> None:
        whole = await driver.run(prompt(20), LONG)
        token = whole.token_ids[5]
        stream = await driver.run(prompt(20), replace(LONG, stop_token_ids=(token,)))
        assert stream.last.finish_reason is FinishReason.STOP
        assert stream.last.stop_reason == token
        assert stream.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        late = replace(LONG, stop_token_ids=(token,), min_tokens=10)
        assert token not in (await driver.run(prompt(20), late)).token_ids[:10]

    async def test_logprobs_come_with_each_token(self, driver: EngineDriver) -> None:
        stream = await driver.run(prompt(20), replace(PLAIN, logprobs=3))
        positions = [x for d in stream.deltas for x in d.logprobs]
        assert tuple(x.sampled.token_id for x in positions) == stream.token_ids
        for position in positions:
            assert [x.rank for x in position.top] == [1, 2, 3]
            assert position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob

    @pytest.mark.parametrize("done", [1, 5, 11])
    @BOTH
    async def test_a_resumed_answer_goes_on_where_the_other_ended(
        self, driver: EngineDriver, sampling: SamplingParams, done: int
    ) -> None:
        whole = await driver.run(prompt(20), sampling)
        resumed = await driver.run(prompt(20), sampling, resume=whole.token_ids[:done])
        assert resumed.token_ids == whole.token_ids[done:]
        assert whole.text.endswith(resumed.text)

    async def test_a_stop_string_is_found_across_the_seam(self, driver: EngineDriver) -> None:
        whole = await driver.run(prompt(20), LONG)
        sampling = replace(LONG, stop=(text_after(whole, 8),))
        ended = await driver.run(prompt(20), sampling)
        for done in range(1, len(ended.token_ids)):
            resumed = await driver.run(prompt(20), sampling, resume=whole.token_ids[:done])
            assert resumed.token_ids == ended.token_ids[done:]
            assert ended.text.endswith(resumed.text)
            assert resumed.last.stop_reason == sampling.stop[0]

    @pytest.mark.parametrize(
        ("token_ids", "max_tokens", "code", "field"),
        [
            ((), 4, "invalid_value", "prompt_token_ids"),
            ((20, 1 << 30), 4, "invalid_value", "prompt_token_ids"),
            ((20,), MODEL.max_model_len, "context_length_exceeded", "max_tokens"),
        ],
    )
    async def test_a_bad_request_ends_with_an_error_that_names_the_field(
        self,
        driver: EngineDriver,
        token_ids: tuple[int, ...],
        max_tokens: int,
        code: str,
        field: str,
    ) -> None:
        stream = await driver.run(token_ids, replace(PLAIN, max_tokens=max_tokens))
        assert_ended_once(stream)
        assert (stream.error.code, stream.error.field) == (code, field)
        await driver.until_empty()

    async def test_cancel_frees_everything_and_the_next_request_is_served(
        self, driver: EngineDriver
    ) -> None:
        stream_id = driver.submit(prompt(20), replace(PLAIN, max_tokens=1000))
        await driver.until(lambda: driver.streams[stream_id].deltas)
        for cancelled in (stream_id, stream_id, 1 << 70):
            driver.engine.cancel(cancelled)
        await driver.until_empty()
        assert len((await driver.run(prompt(20))).token_ids) == PLAIN.max_tokens


class TestHandoff:
    @pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
    @BOTH
    async def test_both_phases_apart_give_the_answer_of_one_engine(
        self, driver: EngineDriver, pair: Pair, sampling: SamplingParams, length: int
    ) -> None:
        whole = await driver.run(prompt(length), sampling)
        apart = await pair.run(prompt(length), sampling)
        assert (apart.token_ids, apart.text) == (whole.token_ids, whole.text)
        resumed = await pair.run(prompt(length), sampling, resume=whole.token_ids[:4])
        assert resumed.token_ids == whole.token_ids[4:]

    async def test_prefill_says_one_token_and_decode_the_others(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        first = await pair.prefill.run(prompt(20), PLAIN, prefill_phase)
        rest = await pair.decode.finish(decoding)
        assert_ended_once(first)
        assert_ended_once(rest)
        assert (len(first.token_ids), len(rest.token_ids)) == (1, PLAIN.max_tokens - 1)
        assert first.last.finish_reason is FinishReason.LENGTH
        assert rest.last.report is not None
        assert rest.last.report.transfer is not None
        assert rest.last.report.transfer.blocks > 0

    async def test_prefill_may_end_before_decode_asks(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        prefill_phase, decode_phase = pair.phases()
        await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        ledger = pair.prefill.engine.ledger()
        assert ledger.pinned_blocks == ledger.leased_blocks > 0
        rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
        assert rest.token_ids == (await driver.run(prompt(40))).token_ids[1:]

    async def test_a_first_token_that_ends_the_answer_holds_nothing(self, pair: Pair) -> None:
        token = (await pair.prefill.run(prompt(20))).token_ids[0]
        sampling = replace(PLAIN, stop_token_ids=(token,))
        first = await pair.prefill.run(prompt(20), sampling, pair.phases()[0])
        assert first.last.finish_reason is FinishReason.STOP

    async def test_a_stop_string_is_found_across_the_handoff(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        whole = await driver.run(prompt(20), LONG)
        sampling = replace(LONG, stop=(whole.text[1:4],))
        one, apart = await driver.run(prompt(20), sampling), await pair.run(prompt(20), sampling)
        assert (apart.token_ids, apart.text) == (one.token_ids, one.text)
        assert apart.last.stop_reason == sampling.stop[0]

    async def test_a_producer_that_is_not_who_it_was_or_not_there_fails_the_transfer(
        self, pair: Pair
    ) -> None:
        prefill_phase, decode_phase = pair.phases(instance_id="of-another-life")
        prefilling = pair.prefill.submit(prompt(20), PLAIN, prefill_phase)
        assert_transfer_failed(await pair.decode.run(prompt(20), PLAIN, decode_phase))
        await pair.prefill.finish(prefilling)
        pair.prefill.engine.cancel(prefilling)
        nobody = DecodePhase("no-one", ("127.0.0.1:1",), pair.producer_instance_id)
        assert_transfer_failed(await pair.decode.run(prompt(20), PLAIN, nobody))

    async def test_a_cancelled_decode_frees_the_blocks_of_the_prefill(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(40), PLAIN, decode_phase)
        await pair.decode.until(lambda: pair.decode.engine.ledger().in_flight_blocks)
        pair.decode.engine.cancel(decoding)
        assert_ended_once(await pair.prefill.run(prompt(40), PLAIN, prefill_phase))

    async def test_a_cancelled_prefill_fails_the_decode(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        prefilling = pair.prefill.submit(prompt(40), PLAIN, prefill_phase)
        await pair.prefill.finish(prefilling)
        pair.prefill.engine.cancel(prefilling)
        assert_transfer_failed(await pair.decode.run(prompt(40), PLAIN, decode_phase))

    @pytest.mark.parametrize("sampling", [LONG, replace(LONG, seed=7)], ids=["greedy", "seeded"])
    async def test_an_exported_stream_goes_on_elsewhere_from_its_kv(
        self, pair: Pair, sampling: SamplingParams
    ) -> None:
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

    async def test_an_export_that_nobody_wants_any_more_frees_its_blocks(self, pair: Pair) -> None:
        await pair.exported(prompt(33), LONG, tokens=5)
        (stream_id,) = pair.prefill.streams
        pair.prefill.engine.cancel(stream_id)

    async def test_a_stream_that_has_no_kv_yet_is_not_exported(self, pair: Pair) -> None:
        """Its prompt is not computed: it ends, for its router to submit it elsewhere."""
        stream_id = pair.prefill.submit(prompt(33), LONG)
        for exported in (stream_id, stream_id, 99):
            pair.prefill.engine.export(exported, "early")
        stream = await pair.prefill.finish(stream_id)
        assert_ended_once(stream)
        assert stream.error.code == "unavailable"


class TestRoomAndTime:
    async def test_a_request_waits_while_blocks_are_lacking(self, small: EngineDriver) -> None:
        fake(small).faults = FakeFaults(stall_at_step=2)
        sampling = replace(PLAIN, max_tokens=16)
        first, second = (small.submit(prompt(64), sampling) for _ in range(2))
        await small.until(lambda: small.streams[first].deltas)
        load = fake(small).load()
        assert (load.num_running_reqs, load.num_waiting_reqs, load.free_blocks) == (1, 1, 3)
        assert load.kv_cache_usage == pytest.approx(5 / 8)
        fake(small).cancel(first)
        fake(small).faults = FakeFaults()
        assert len((await small.finish(second)).token_ids) == 16

    async def test_no_more_requests_run_than_there_are_slots(self, small: EngineDriver) -> None:
        ids = [small.submit(prompt(4)) for _ in range(3)]
        for stream_id in ids:
            await small.finish(stream_id)
        assert [d.stream_id for d in small.steps[0]] == ids[:2]

    async def test_a_request_that_can_never_have_its_blocks_is_refused(
        self, small: EngineDriver
    ) -> None:
        stream = await small.run(prompt(120), replace(PLAIN, max_tokens=16))
        assert stream.error.field == "max_tokens"

    async def test_steps_take_the_scripted_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slept: list[float] = []
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            slept.append(seconds)
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", noted)
        driver = make_driver(FakeSettings(start_s=9.0, prefill_s=0.5, step_s=2.0))
        await driver.start()
        await driver.run(prompt(10), replace(PLAIN, max_tokens=3))
        await driver.close()
        assert slept == [9.0, 7.0, 2.0, 2.0]


class TestTransfers:
    async def test_blocks_that_nobody_fetches_are_free_when_the_lease_ends(self) -> None:
        async with a_pair(lease_s=0.05) as pair:
            prefill_phase, decode_phase = pair.phases()
            await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
            await pair.prefill.until_empty()
            rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
            assert_transfer_failed(rest, "its lease has ended")

    async def test_a_transfer_that_nobody_prefills_fails_and_holds_nothing_afterwards(self) -> None:
        async with a_pair(pairing_s=0.05) as pair:
            prefill_phase, decode_phase = pair.phases()
            assert_transfer_failed(await pair.decode.run(prompt(40), PLAIN, decode_phase))
            first = await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
            assert len(first.token_ids) == 1
            assert pair.prefill.engine.ledger().is_empty

    async def test_wrong_kv_is_seen_in_the_first_token_after_it(self, pair: Pair) -> None:
        good = await pair.run(prompt(40))
        fake(pair.prefill).faults = FakeFaults(corrupt_transfer="*")
        bad = await pair.run(prompt(40))
        assert bad.token_ids[0] == good.token_ids[0]
        assert bad.token_ids[1:3] != good.token_ids[1:3]

    async def test_engines_of_other_processes_are_reached_over_tcp(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = await pair.run(prompt(40))
        monkeypatch.setattr(engine, "_local", {})
        assert (await pair.run(prompt(40))).token_ids == whole.token_ids
        fake(pair.prefill).faults = FakeFaults(drop_transfer="*")
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        await pair.prefill.run(prompt(20), PLAIN, prefill_phase)
        assert_transfer_failed(await pair.decode.finish(decoding), "dropped")
        fake(pair.prefill).crash()
        assert_transfer_failed(await pair.decode.run(prompt(20), PLAIN, decode_phase))

    async def test_a_running_transfer_is_in_flight_on_both_sides_until_a_crash(
        self, pair: Pair
    ) -> None:
        fake(pair.prefill).faults = FakeFaults(delay_transfer_s=30.0)
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(40), PLAIN, decode_phase)
        await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        await pair.prefill.until(lambda: pair.prefill.engine.ledger().in_flight_blocks)
        assert pair.prefill.engine.ledger().in_flight_blocks == 3
        assert pair.decode.engine.ledger().in_flight_blocks == 4
        fake(pair.prefill).crash()
        assert_transfer_failed(await pair.decode.finish(decoding))


class TestFaults:
    async def test_a_failed_prefill_ends_with_an_error_and_fails_the_transfer(
        self, pair: Pair
    ) -> None:
        fake(pair.prefill).faults = FakeFaults(fail_prefill="bad-*")
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        failing = pair.prefill.submit(prompt(20), PLAIN, prefill_phase, request_id="bad-1")
        assert (await pair.prefill.finish(failing)).error.code == "worker_failed"
        assert_transfer_failed(await pair.decode.finish(decoding))
        assert (await pair.prefill.run(prompt(20))).last.error is None

    async def test_an_engine_that_stalls_at_a_step_makes_all_before_it(
        self, driver: EngineDriver
    ) -> None:
        fake(driver).faults = FakeFaults(stall_at_step=4)
        stream_id = driver.submit(prompt(20))
        stream = driver.streams[stream_id]
        await driver.until(lambda: len(stream.token_ids) == 3)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(stream.token_ids) == 3
        fake(driver).faults = FakeFaults()
        assert len((await driver.finish(stream_id)).token_ids) == PLAIN.max_tokens

    async def test_a_crash_ends_every_stream_and_is_told_once(self, driver: EngineDriver) -> None:
        fake(driver).faults = FakeFaults(crash_at_step=2)
        assert (await driver.run(prompt(20))).error.code == "worker_failed"
        fake(driver).crash()
        assert len(driver.failures) == 1
        assert (await driver.run(prompt(20))).error.code == "worker_failed"
        assert driver.engine.ledger().is_empty


@pytest.mark.parametrize(
    "args",
    [{"nonsense": 1}, {"total_blocks": "9"}, {"stalled": 1}, {"total_blocks": 0}, {"step_s": -1.0}],
)
def test_an_argument_that_cannot_be_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from_args(args, kv=None)
    assert caught.value.field == f"engine_args.{next(iter(args))}"
