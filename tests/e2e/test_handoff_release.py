"""Whatever ends a request, and whenever: both sides have their blocks back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from pdserve.types import FinishReason
from tests.support.engine_pair import EnginePair, joined, params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.timeouts import wait_until
from workers.engine import DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG, ENDLESS = params(200, ignore_eos=True), params(3000, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def obeying(tiny_model: Path, orders: Path) -> AsyncIterator[EngineProcess]:
    """Start a prefill engine that reads `orders` before each copy."""
    kv = ConnectorConfig(transports=("shm",), hold_s=5.0)
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, instance_id="stalling", max_num_batched_tokens=256),
        env={"PDSERVE_TEST_CORRUPT_KV": str(orders)},
    )
    yield engine
    await engine.close()


@pytest.fixture
def stalling(pair_shm: EnginePair, obeying: EngineProcess, orders: Path) -> Iterator[EnginePair]:
    """Yield a pair whose prefill engine waits in each copy until `orders` says otherwise."""
    orders.with_suffix(".stalled").unlink(missing_ok=True)
    orders.write_text("stall", encoding="ascii")
    yield EnginePair(obeying, pair_shm.decode, "stalling")
    orders.write_text("", encoding="ascii")


def both(pair: EnginePair, streams: tuple[int, int]) -> None:
    pair.prefill.cancel(streams[0])
    pair.decode.cancel(streams[1])


def fresh(pair: EnginePair, length: int, seed: int) -> list[int]:
    """Return a prompt that no engine of the pair has cached."""
    return prompt(length, seed + 10_000 * pair.decode.pid)


async def submit_and_catch(pair: EnginePair, seed: int) -> tuple[int, int]:
    """A request whose decode engine has reserved blocks that are not its own yet. When it was
    computed before anybody looked, another is asked for."""
    for again in itertools.count():
        streams = pair.submit(fresh(pair, 3500, seed + 100 * again), LONG)
        while not pair.decode.answer(streams[1]).deltas:
            if (await pair.decode.status())[1].in_flight_blocks:
                return streams
        await pair.collect(streams)
    raise AssertionError


async def until_inside(orders: Path) -> None:
    """Wait until the producer is inside a copy."""
    await wait_until(orders.with_suffix(".stalled").exists)


async def serves(pair: EnginePair, aggregated: EngineProcess, seed: int) -> None:
    """Assert that the next answer is exact and that nothing is left."""
    ids = prompt(150, seed)
    assert await pair.run(ids, params()) == joined(await aggregated.run(ids, params()))
    await pair.until_empty()


async def test_cancel_while_the_prompt_is_being_computed(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    for seed in itertools.count(50, step=1000):
        streams = await submit_and_catch(pair, seed)
        both(pair, streams)
        await pair.until_empty()
        if not pair.prefill.answer(streams[0]).token_ids:
            break  # else it was computed before the cancel came
    await serves(pair, aggregated, 51)


async def test_cancel_before_anything_was_scheduled(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    for seed in range(8):
        both(pair, pair.submit(fresh(pair, 100, 60 + seed), LONG))
    await pair.until_empty()
    await serves(pair, aggregated, 61)


async def test_cancel_while_blocks_travel(
    stalling: EnginePair, aggregated: EngineProcess, orders: Path
) -> None:
    streams = stalling.submit(fresh(stalling, 500, 70), LONG)
    await stalling.prefill.collect(streams[0])
    await until_inside(orders)
    both(stalling, streams)
    # The producer is inside a copy: its blocks stay pinned, whatever the router wants.
    assert (await stalling.prefill.status())[1].leased_blocks == 16
    orders.write_text("", encoding="ascii")
    await stalling.until_empty()
    await serves(stalling, aggregated, 71)


async def test_cancel_while_decoding(pair: EnginePair, aggregated: EngineProcess) -> None:
    streams = pair.submit(fresh(pair, 300, 80), ENDLESS)
    await pair.decode.until(lambda: pair.decode.answer(streams[1]).token_ids)
    both(pair, streams)
    await pair.until_empty()
    assert pair.decode.answer(streams[1]).finish_reason is None
    await serves(pair, aggregated, 81)


async def test_a_cancelled_prefill_fails_its_decode(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    for seed in itertools.count(90, step=1000):
        streams = await submit_and_catch(pair, seed)
        pair.prefill.cancel(streams[0])
        answer = await pair.decode.collect(streams[1])
        if not pair.prefill.answer(streams[0]).token_ids:
            break  # else it was computed before the cancel came
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    assert not answer.token_ids
    await pair.until_empty()
    await serves(pair, aggregated, 91)


async def test_a_cancelled_decode_frees_its_prefill(
    pair: EnginePair, aggregated: EngineProcess
) -> None:
    streams = pair.submit(fresh(pair, 600, 100), LONG)
    pair.decode.cancel(streams[1])
    await pair.prefill.collect(streams[0])
    await pair.until_empty()
    await serves(pair, aggregated, 101)


async def test_unfetched_prefill_blocks_are_freed_when_the_lease_ends(stalling: EnginePair) -> None:
    await stalling.prefill.run(prompt(200, 110), LONG, PrefillPhase("nobody"))
    assert (await stalling.prefill.status())[1].leased_blocks == 7
    await stalling.prefill.until_empty()


async def test_a_decode_of_an_unknown_transfer_fails(stalling: EnginePair) -> None:
    phase = DecodePhase("never-heard-of", stalling.prefill.addresses, stalling.instance_id)
    answer = await stalling.decode.run(prompt(200, 120), LONG, phase)
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    await stalling.decode.until_empty()


@pytest.mark.parametrize(("instance_id", "reason"), [("an-older-life", "restarted"), (None, "")])
async def test_a_restarted_source_is_refused(
    pair_shm: EnginePair, instance_id: str | None, reason: str
) -> None:
    addresses = pair_shm.prefill.addresses if instance_id else ("127.0.0.1:1",)
    phase = DecodePhase("t-instance", addresses, instance_id or "gone")
    answer = await pair_shm.decode.run(prompt(64, 130), LONG, phase)
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    assert reason in answer.error.message
    await pair_shm.decode.until_empty()


async def test_a_prefill_killed_while_blocks_travel_fails_its_decode(
    stalling: EnginePair, orders: Path
) -> None:
    streams = stalling.submit(fresh(stalling, 500, 140), LONG)
    await stalling.prefill.collect(streams[0])
    await until_inside(orders)
    await stalling.prefill.kill()
    answer = await stalling.decode.collect(streams[1])
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    await stalling.decode.until_empty()
