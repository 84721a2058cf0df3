"""The model of the exactness tests notices damage: without this, exactness would prove nothing. The
digests here are those of the wrong blocks; others would find the damage (test_kv_integrity.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from pdserve.types import SamplingParams
from tests.e2e.engines import EngineProcess, settings
from tests.e2e.pair import Pair
from tests.e2e.test_handoff_exact import params, prompt
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the damaging prefill engine is to do, read by it before each copy."""
    path = tmp_path_factory.mktemp("orders") / "order"
    give(path, "")
    return path


def give(orders: Path, order: str) -> None:
    orders.write_text(order, encoding="ascii")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def damaging(pair_shm: Pair, tiny_model: Path, orders: Path) -> AsyncIterator[Pair]:
    kv = KvSettings("damaging", {"transports": ("shm",)})
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, max_num_batched_tokens=256),
        env={"PDSERVE_TEST_CORRUPT": str(orders)},
    )
    yield Pair(engine, pair_shm.decode, "damaging")
    await engine.close()


@pytest.mark.parametrize("at", [0, 50, 199])
async def test_a_flipped_prompt_token_changes_the_answer(
    aggregated: EngineProcess, at: int
) -> None:
    ids = prompt(200, 21)
    other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    whole = await aggregated.run(ids, params(24, ignore_eos=True))
    assert (await aggregated.run(other, params(24, ignore_eos=True))).token_ids != whole.token_ids


@pytest.mark.parametrize("damage", ["swap", "repeat"])
async def test_a_damaged_block_changes_the_answer(
    damaging: Pair, aggregated: EngineProcess, orders: Path, damage: str
) -> None:
    ids = prompt(200, len(damage) + 30)
    expected = await aggregated.run(ids, SAMPLING)
    give(orders, damage)
    found = await damaging.run(ids, SAMPLING)
    give(orders, "")
    assert len(found.token_ids) == len(expected.token_ids)
    assert found.token_ids != expected.token_ids
    # The damaged blocks are in the decode engine's prefix cache now: another prompt is unharmed.
    clean = prompt(200, len(damage) + 40)
    expected = await aggregated.run(clean, SAMPLING)
    assert (await damaging.run(clean, SAMPLING)).token_ids == expected.token_ids
    await damaging.until_empty()
