"""What the fake engine can be scripted to do: room, latencies, faults."""

from __future__ import annotations

import asyncio
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


MODEL = ModelInfo(name="fake", path="", max_model_len=4096, vocab_size=512, dtype="none")


@asynccontextmanager
async def a_pair(**times: Any) -> AsyncIterator[Pair]:
    kv = [FakeKv(x, **{**PATIENT_KV, **times}) for x in ("p1", "d1")]
    prefill, decode = (EngineDriver(FakeEngine(MODEL, FakeSettings(kv=x))) for x in kv)
    await prefill.start()
    await decode.start()
    try:
        yield Pair(prefill, decode, "p1")
    finally:
        await prefill.close()
        await decode.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with a_pair() as pair:
        yield pair


def fake(driver: EngineDriver) -> FakeEngine:
    assert isinstance(driver.engine, FakeEngine)
    return driver.engine


@pytest.fixture
async def small() -> AsyncIterator[EngineDriver]:
    settings = FakeSettings(block_size=16, total_blocks=8, max_num_seqs=2)
    driver = await EngineDriver(FakeEngine(MODEL, settings)).start()
    yield driver
    await driver.close()


class TestRoom:
    async def test_a_request_waits_while_blocks_are_lacking(self, small: EngineDriver) -> None:
        fake(small).faults = FakeFaults(stall_at_step=2)
        sampling = replace(PLAIN, max_tokens=16)
        first, second = (small.submit(prompt(64), sampling) for _ in range(2))
        await small.until(lambda: small.streams[first].deltas)
        load = fake(small).load()
        assert load is not None
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


async def test_steps_take_the_scripted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    driver = EngineDriver(FakeEngine(MODEL, FakeSettings(start_s=9.0, prefill_s=0.5, step_s=2.0)))
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
            assert rest.error.code == "transfer_failed"
            assert "lease" in rest.error.message
            await pair.until_empty()

    async def test_a_transfer_that_nobody_prefills_fails_and_holds_nothing_afterwards(self) -> None:
        async with a_pair(pairing_s=0.05) as pair:
            prefill_phase, decode_phase = pair.phases()
            rest = await pair.decode.run(prompt(40), PLAIN, decode_phase)
            assert rest.error.code == "transfer_failed"
            await pair.until_empty()
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
        _, decode_phase = pair.phases()
        await pair.until_empty()
        fake(pair.prefill).crash()
        rest = await pair.decode.run(prompt(20), PLAIN, decode_phase)
        assert rest.error.code == "transfer_failed"

    async def test_a_running_transfer_is_in_flight_on_both_sides(self, pair: Pair) -> None:
        fake(pair.prefill).faults = FakeFaults(delay_transfer_s=30.0)
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(40), PLAIN, decode_phase)
        await pair.prefill.run(prompt(40), PLAIN, prefill_phase)
        await pair.prefill.until(lambda: pair.prefill.engine.ledger().in_flight_blocks)
        assert pair.prefill.engine.ledger().in_flight_blocks == 3
        assert pair.decode.engine.ledger().in_flight_blocks == 4
        pair.decode.engine.cancel(decoding)
        await pair.until_empty()


class TestFaults:
    async def test_a_failed_prefill_ends_with_an_error_and_fails_the_transfer(
        self, pair: Pair
    ) -> None:
        fake(pair.prefill).faults = FakeFaults(fail_prefill="bad-*")
        prefill_phase, decode_phase = pair.phases()
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        failing = pair.prefill.submit(prompt(20), PLAIN, prefill_phase, request_id="bad-1")
        assert (await pair.prefill.finish(failing)).error.code == "worker_failed"
        assert (await pair.decode.finish(decoding)).error.code == "transfer_failed"
        await pair.until_empty()
        assert (await pair.prefill.run(prompt(20))).last.error is None

    async def test_an_engine_that_stalls_at_a_step_makes_all_before_it(self, pair: Pair) -> None:
        driver = pair.decode
        fake(driver).faults = FakeFaults(stall_at_step=4)
        stream_id = driver.submit(prompt(20))
        stream = driver.streams[stream_id]
        await driver.until(lambda: len(stream.token_ids) == 3)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(stream.token_ids) == 3
        fake(driver).faults = FakeFaults()
        assert len((await driver.finish(stream_id)).token_ids) == PLAIN.max_tokens

    async def test_a_crash_ends_every_stream_and_is_told_once(self, pair: Pair) -> None:
        driver = pair.decode
        fake(driver).faults = FakeFaults(crash_at_step=2)
        stream = await driver.run(prompt(20))
        assert stream.error.code == "worker_failed"
        fake(driver).crash()
        assert len(driver.failures) == 1
        late = await driver.run(prompt(20))
        assert late.error.code == "worker_failed"
        assert driver.engine.ledger().is_empty

    async def test_a_crashed_prefill_engine_fails_the_transfers_from_it(self, pair: Pair) -> None:
        prefill_phase, decode_phase = pair.phases()
        fake(pair.prefill).faults = FakeFaults(delay_transfer_s=30.0)
        decoding = pair.decode.submit(prompt(20), PLAIN, decode_phase)
        await pair.prefill.run(prompt(20), PLAIN, prefill_phase)
        await pair.prefill.until(lambda: pair.prefill.engine.ledger().in_flight_blocks)
        fake(pair.prefill).crash()
        assert (await pair.decode.finish(decoding)).error.code == "transfer_failed"


@pytest.mark.parametrize(
    "args",
    [
        {"nonsense": 1},
        {"total_blocks": "9"},
        {"stalled": 1},
        {"step_s": True},
        {"total_blocks": 0},
        {"step_s": -1.0},
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from_args(args, kv=None)
    assert caught.value.field == f"engine_args.{next(iter(args))}"
