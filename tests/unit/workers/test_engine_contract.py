"""The fake engine keeps the promises of workers/engine.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.types import ModelInfo
from tests.unit.workers.engine_contract import EngineContract, HandoffContract
from tests.unit.workers.engine_driver import EngineDriver, Pair
from tests.unit.workers.router_side import PATIENT_KV
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeKv, FakeSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MODEL = ModelInfo(name="fake", path="", max_model_len=4096, vocab_size=512, dtype="none")


def make_engine(instance_id: str) -> FakeEngine:
    return FakeEngine(MODEL, FakeSettings(kv=FakeKv(instance_id, **PATIENT_KV)))


@pytest.fixture
async def driver() -> AsyncIterator[EngineDriver]:
    driver = await EngineDriver(make_engine("a1")).start()
    yield driver
    await driver.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    prefill = await EngineDriver(make_engine("p1")).start()
    decode = await EngineDriver(make_engine("d1")).start()
    yield Pair(prefill, decode, "p1")
    await prefill.close()
    await decode.close()


class TestEngineContract(EngineContract):
    pass


class TestHandoffContract(HandoffContract):
    pass
