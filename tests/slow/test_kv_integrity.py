"""Wrong KV and wrong prompts change the answers of real engines, and audits find it. Otherwise
tests of exactness would prove nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from router.control.audits import FLOAT32_MARGIN, compare
from tests.support.engine_pair import EnginePair, params, prompt
from tests.support.engines import EngineProcess, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from router.control.audits import Comparison

pytestmark = pytest.mark.asyncio(loop_scope="session")
GREEDY = params(24, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def producer(tiny_model: Path, orders: Path) -> AsyncIterator[EngineProcess]:
    kv = ConnectorConfig(transports=("shm", "tcp"), chunk_bytes=1 << 19)
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, instance_id="damaging", max_num_batched_tokens=256),
        env={"PDSERVE_TEST_CORRUPT_KV": str(orders)},
    )
    yield engine
    await engine.close()


@pytest.fixture
def damaging(pair: EnginePair, producer: EngineProcess) -> EnginePair:
    """Return the engine that damages KV, with a decode engine of one transport."""
    return EnginePair(producer, pair.decode, "damaging")


async def audit(engine: EngineProcess, ids: list[int], answer: Sequence[int]) -> Comparison:
    """Compute an answer again as a router's audit does."""
    asked = params(1, prompt_logprobs=1)
    stream = engine.submit([*ids, *answer], asked, scored_from=len(ids))
    (delta,) = (await engine.collect(stream)).deltas
    return compare(answer, delta.prompt_logprobs, FLOAT32_MARGIN)


@pytest.mark.parametrize("damage", ["", "swap", "repeat", "shift", "drop", "rotary"])
async def test_an_audit_finds_wrong_blocks_and_a_wrong_rotary_scale(
    damaging: EnginePair,
    aggregated: EngineProcess,
    orders: Path,
    damage: str,
    request: pytest.FixtureRequest,
) -> None:
    # A prompt of its own for each case, because wrong KV stays in the producer's prefix cache.
    ids = prompt(200, sum(map(ord, damage + request.node.callspec.params["pair"])))
    expected = await aggregated.run(ids, GREEDY)
    orders.write_text(damage, encoding="ascii")
    found = await damaging.run(ids, GREEDY)
    orders.write_text("", encoding="ascii")
    assert len(found.token_ids) == len(expected.token_ids)
    audited = await audit(aggregated, ids, found.token_ids)
    assert (found.token_ids != expected.token_ids) == bool(damage)
    assert (audited.at is not None) == bool(damage), audited
    await damaging.until_empty()


@pytest.mark.parametrize("at", [0, 31, 32, 100, 198, 199])
async def test_a_changed_prompt_token_changes_the_answer(
    aggregated: EngineProcess, at: int
) -> None:
    ids = prompt(200, 21)
    other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    answer = await aggregated.run(ids, GREEDY)
    assert len(set(answer.token_ids)) > 4, "an echo"
    assert (await aggregated.run(other, GREEDY)).token_ids != answer.token_ids
