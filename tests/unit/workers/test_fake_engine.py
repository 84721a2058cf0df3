"""The fake engine keeps the promises of workers/engine.py, and does what it is scripted to do.
tests/e2e tests the promises on vLLM."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve.config import SessionRetentionConfig
from pdserve.errors import ConfigError
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from tests.support.cluster import fake_answer
from tests.support.fake_router import (
    MODEL,
    PAIRING_S,
    PATIENT_KV,
    PLAIN,
    FakeRouter,
    engine_of,
    error_of,
    running_worker,
    token_ids,
)
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeFaults, FakeSettings, settings_from_args

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.types import StreamDelta
    from workers.server import WorkerServer

PROMPT = [20 + 7 * i % 40 for i in range(40)]
WHOLE = fake_answer(PROMPT, PLAIN, MODEL.vocab_size).token_ids
SMALL = FakeSettings(total_blocks=8, max_num_seqs=2)


@dataclass(frozen=True, slots=True)
class Pair:
    """A router's sessions with a prefill and a decode worker. Asserts at the exit that no block is
    pinned."""

    source: WorkerServer
    prefill: FakeRouter
    decode: FakeRouter

    async def compute(self, transfer: int) -> list[StreamDelta]:
        """Submit the prefill part of a transfer."""
        phase = w.PrefillPhase(transfer_id=f"{transfer}")
        await self.prefill.submit(transfer, tokens=PROMPT, prefill=phase)
        return await self.prefill.finish(transfer)

    async def fetch(self, transfer: int) -> None:
        """Submit the decode part of a transfer."""
        kv = self.source.info.kv
        assert kv is not None
        phase = w.DecodePhase(
            transfer_id=f"{transfer}",
            producer_addresses=kv.addresses,
            producer_instance_id=self.source.info.instance_id,
        )
        await self.decode.submit(transfer, tokens=PROMPT, decode=phase)

    async def fails(self, transfer: int, why: str = "") -> None:
        """Assert that the decode part ends with an error and no token."""
        deltas = await self.decode.finish(transfer)
        assert error_of(deltas)[0] == "transfer_failed"
        assert deltas[-1].error is not None
        assert why in deltas[-1].error.message
        assert not token_ids(deltas)


@asynccontextmanager
async def a_pair(
    *, hold_s: float = PATIENT_KV.hold_s, pairing_s: float = PAIRING_S
) -> AsyncIterator[Pair]:
    settings, kv = FakeSettings(pairing_s=pairing_s), structs.replace(PATIENT_KV, hold_s=hold_s)
    prefill, decode = (
        FakeEngine(MODEL, settings, kv, f"{role}-instance") for role in (Role.PREFILL, Role.DECODE)
    )
    async with (
        running_worker(Role.PREFILL, engine=prefill) as source,
        running_worker(Role.DECODE, engine=decode) as target,
        FakeRouter(source) as first,
        FakeRouter(target) as second,
    ):
        yield Pair(source, first, second)


async def test_cached_kv_is_copied_without_being_computed_and_else_not_at_all() -> None:
    settings = FakeSettings(prefix_cache=True)
    engines = [
        FakeEngine(MODEL, settings, PATIENT_KV, f"{role}-instance")
        for role in (Role.DECODE, Role.PREFILL)
    ]
    async with (
        running_worker(Role.DECODE, engine=engines[0]) as source,
        running_worker(Role.PREFILL, engine=engines[1]) as target,
        FakeRouter(source) as first,
        FakeRouter(target) as second,
    ):
        pair = Pair(source, first, second)
        copied = w.PrefillPhase(transfer_id="1", min_cached_tokens=32)
        for number, transfer in enumerate(("1", "2")):
            copied.transfer_id = transfer
            await pair.fetch(number + 1)
            await first.submit(number + 1, tokens=PROMPT, prefill=copied)
            if not number:
                assert error_of(await first.finish(1))[0] == "transfer_failed"
                await pair.fails(1, "0 tokens are cached, not 32")
                await first.submit(9, tokens=PROMPT)
                await first.finish(9)
        computed, received = await first.finish(2), await second.finish(2)
        assert [*token_ids(computed), *token_ids(received)] == WHOLE
        assert computed[-1].report is not None
        assert computed[-1].report.cached_tokens == 32


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_the_history_of_a_session_is_evicted_after_the_blocks_of_others(share: float) -> None:
    settings = structs.replace(SMALL, prefix_cache=True)
    lease = SessionRetentionConfig(share=share)
    async with (
        running_worker(engine=FakeEngine(MODEL, settings, retention=lease)) as server,
        FakeRouter(server) as router,
    ):
        await router.submit(1, tokens=PROMPT, next_turn_s=0.0)
        made = token_ids(await router.finish(1))
        for number in range(2, 6):
            await router.submit(number, tokens=[number, *PROMPT])
            await router.finish(number)
        load = server.service.load()
        assert load is not None
        assert load.session_blocks == (2 if share else 0)
        await router.submit(9, tokens=[*PROMPT, *made, 5, 6, 7], next_turn_s=0.0)
        report = (await router.finish(9))[-1].report
        assert report is not None
        assert report.cached_tokens == (32 if share else 0)
        await router.until_empty()


async def test_prefill_may_end_before_decode_asks() -> None:
    async with a_pair() as pair:
        await pair.compute(1)
        ledger = (await pair.prefill.status()).ledger
        assert ledger.leased_blocks > 0 == ledger.in_flight_blocks
        await pair.fetch(1)
        assert token_ids(await pair.decode.finish(1)) == WHOLE[1:]


async def test_a_request_waits_while_blocks_are_lacking() -> None:
    async with running_worker(timing=SMALL) as server, FakeRouter(server) as router:
        fake = engine_of(server)
        fake.faults = FakeFaults(stalled=True)
        sampling = replace(PLAIN, max_tokens=16)
        for stream_id in (1, 2):
            await router.submit(stream_id, sampling, tokens=range(64))
        await router.until_open(2)
        fake.faults = FakeFaults(stall_at_step=2)
        await router.until(lambda: router.deltas.get(1))
        load = fake.load()
        assert (load.num_running_reqs, load.num_waiting_reqs, load.free_blocks) == (1, 1, 3)
        assert load.kv_cache_usage == pytest.approx(5 / 8)
        await router.cancel(1)
        await router.until_open(1)
        fake.faults = FakeFaults()
        assert len(token_ids(await router.finish(2))) == 16


async def test_no_more_requests_run_than_there_are_slots() -> None:
    async with running_worker(timing=SMALL) as server, FakeRouter(server) as router:
        engine_of(server).faults = FakeFaults(stalled=True)
        for stream_id in (1, 2, 3):
            await router.submit(stream_id)
        await router.until_open(3)
        engine_of(server).faults = FakeFaults()
        for stream_id in (1, 2, 3):
            await router.finish(stream_id)
        first = next(x.tokens.stream_ids for x in router.frames if x.tokens.stream_ids)
        assert list(first) == [1, 2]


async def test_a_request_that_can_never_have_its_blocks_is_refused() -> None:
    async with running_worker(timing=SMALL) as server, FakeRouter(server) as router:
        await router.submit(1, replace(PLAIN, max_tokens=16), tokens=range(120))
        assert error_of(await router.finish(1))[1] == "max_tokens"


async def test_unfetched_blocks_are_free_when_the_hold_ends() -> None:
    async with a_pair(hold_s=0.05) as pair:
        await pair.compute(1)
        await pair.prefill.until_empty()
        await pair.fetch(1)
        await pair.fails(1, "its hold has ended")


async def test_a_transfer_that_nobody_prefills_fails_and_holds_nothing_afterwards() -> None:
    async with a_pair(pairing_s=0.05) as pair:
        await pair.fetch(1)
        await pair.fails(1)
        assert token_ids(await pair.compute(1)) == WHOLE[:1]
        await pair.prefill.until_empty()


async def test_engines_of_other_processes_are_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_pair() as pair:
        monkeypatch.setattr("workers.fake.producer._local", {})
        await pair.fetch(1)
        await pair.compute(1)
        assert token_ids(await pair.decode.finish(1)) == WHOLE[1:]
        engine_of(pair.source).faults = FakeFaults(drop_transfer="*")
        await pair.fetch(2)
        await pair.compute(2)
        await pair.fails(2, "dropped")


@pytest.mark.parametrize(
    "args",
    [{"nonsense": 1}, {"total_blocks": "9"}, {"stalled": 1}, {"total_blocks": 0}, {"step_s": -1.0}],
)
def test_an_argument_that_cannot_be_is_refused_by_name(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from_args(args)
    assert caught.value.field == f"engine_args.{next(iter(args))}"
