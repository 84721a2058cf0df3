"""The fake engine keeps the promises of workers/engine.py, and does what it is scripted to do.
tests/e2e tests the promises on vLLM."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.types import ModelInfo
from tests.unit.workers.engine_driver import PLAIN, EngineDriver, Pair, prompt
from tests.unit.workers.router_side import PATIENT_KV
from workers.fake import engine
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeFaults, FakeKv, FakeSettings, settings_from_args

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.workers.engine_driver import Stream

MODEL = ModelInfo(name="fake", path="", max_model_len=4096, vocab_size=512, dtype="none")
LONG = replace(PLAIN, max_tokens=64)


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


class TestHandoff:
    async def test_prefill_may_end_before_decode_asks(
        self, driver: EngineDriver, pair: Pair
    ) -> None:
        prefill_phase, decode_phase = pair.phases()
        await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        ledger = pair.prefill.engine.ledger()
        assert ledger.pinned_blocks == ledger.leased_blocks > 0
        rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
        assert rest.token_ids == (await driver.run(prompt(40))).token_ids[1:]

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


@pytest.mark.parametrize(
    "args",
    [{"nonsense": 1}, {"total_blocks": "9"}, {"stalled": 1}, {"total_blocks": 0}, {"step_s": -1.0}],
)
def test_an_argument_that_cannot_be_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from_args(args, kv=None)
    assert caught.value.field == f"engine_args.{next(iter(args))}"
