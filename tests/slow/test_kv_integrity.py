"""Bits that flip in transferred KV, on real engines: found, sent again, and never in an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from pdserve.errors import TransferCorrupted
from pdserve.types import SamplingParams
from tests.e2e.engines import Answer, EngineProcess, settings
from tests.e2e.pair import Pair, joined
from tests.e2e.test_handoff_exact import prompt
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")
SAMPLING = SamplingParams(
    temperature=0.9, seed=7, frequency_penalty=0.5, max_tokens=24, ignore_eos=True
)
# More than one chunk of prefill, and of the transfer; the last block is partial.
LENGTH = 700


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the damaging prefill engine is to do, read by it at each push."""
    path = tmp_path_factory.mktemp("orders") / "order"
    give(path, "")
    return path


def give(orders: Path, order: str) -> None:
    orders.write_text(order, encoding="ascii")


def is_done(orders: Path) -> bool:
    return not orders.read_text(encoding="ascii")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def source(tiny_model: Path, orders: Path) -> AsyncIterator[EngineProcess]:
    """A prefill engine that damages what it sends when it is told to."""
    kv = KvSettings("damaging", {"transports": ("shm", "tcp"), "chunk_bytes": 1 << 19})
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, max_num_batched_tokens=256),
        env={"PDSERVE_TEST_CORRUPT": str(orders)},
    )
    yield engine
    await engine.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, source: EngineProcess) -> Pair:
    """The damaging engine with a target that takes one transport alone."""
    other: Pair = request.getfixturevalue(f"pair_{request.param}")
    return Pair(source, other.decode, "damaging")


async def test_one_flipped_bit_is_sent_again_and_the_answer_exact(
    pair: Pair, aggregated: EngineProcess, orders: Path, request: pytest.FixtureRequest
) -> None:
    ids = prompt(LENGTH, len(request.node.name))
    expected = joined(await aggregated.run(ids, SAMPLING))
    give(orders, "flip once")
    assert await pair.run(ids, SAMPLING) == expected
    assert is_done(orders), "nothing was damaged"
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.digest_mismatches == 1
    await pair.until_empty()


async def damaged_each_time(pair: Pair, ids: list[int], orders: Path) -> Answer:
    """The first token of an answer whose transfer fails."""
    give(orders, "flip")
    prefill_stream, decode_stream = pair.submit(ids, SAMPLING)
    first = await pair.prefill.collect(prefill_stream)
    failed = await pair.decode.collect(decode_stream)
    give(orders, "")
    assert failed.token_ids == ()
    assert failed.error is not None
    assert failed.error.code == TransferCorrupted.code
    await pair.until_empty()
    return first


async def test_a_recompute_where_the_damage_lies_is_exact(
    pair: Pair, aggregated: EngineProcess, orders: Path, request: pytest.FixtureRequest
) -> None:
    """The damaged blocks were never in the decode engine's prefix cache."""
    ids = prompt(LENGTH, len(request.node.name))
    expected = joined(await aggregated.run(ids, SAMPLING))
    first = await damaged_each_time(pair, ids, orders)
    rest = await pair.decode.run(ids, SAMPLING, resume=first.token_ids)
    assert joined(first, rest) == expected
    await pair.until_empty()


async def test_another_transfer_goes_on_exactly_after_the_first_token(
    pair: Pair, aggregated: EngineProcess, orders: Path, request: pytest.FixtureRequest
) -> None:
    """What the router does first, where it has another pair."""
    ids = prompt(LENGTH, len(request.node.name))
    expected = joined(await aggregated.run(ids, SAMPLING))
    first = await damaged_each_time(pair, ids, orders)
    rest = await pair.run(ids, SAMPLING, resume=first.token_ids)
    assert joined(first).token_ids + rest.token_ids == expected.token_ids
    assert joined(first).text + rest.text == expected.text
    assert (rest.finish_reason, rest.stop_reason) == (expected.finish_reason, expected.stop_reason)
    report = pair.last[1].report
    assert report is not None
    assert report.transfer is not None
    assert report.transfer.blocks == -(-(LENGTH + 1) // 32)
    await pair.until_empty()
