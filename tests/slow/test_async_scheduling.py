"""The promises of hand-offs hold with asynchronous scheduling, as on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from tests.e2e.test_engine_promises import *  # noqa: F403
from tests.e2e.test_handoff_exact import (  # noqa: F401
    test_an_answer_resumed_elsewhere_is_exact,
    test_every_kind_of_sampling_is_exact,
    test_many_at_once_are_exact,
    test_prefix_hits_on_either_side_are_exact,
)
from tests.e2e.test_handoff_release import *  # noqa: F403
from tests.support.engine_fixtures import LEASE_S
from tests.support.engine_pair import EnginePair
from tests.support.engines import EngineProcess, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair_shm(tiny_model: Path) -> AsyncIterator[EnginePair]:
    """Start both engines with asynchronous scheduling."""
    engines = [
        await EngineProcess.start(
            settings(
                tiny_model,
                kv=ConnectorConfig(transports=("shm",), hold_s=LEASE_S),
                instance_id=name,
                max_num_batched_tokens=256,
            ),
            env={"PDSERVE_TEST_ASYNC_SCHEDULING": "1"},
        )
        for name in ("p", "d")
    ]
    assert {x.info.settings["async_scheduling"] for x in engines} == {"True"}
    yield EnginePair(*engines, "p")
    for engine in engines:
        await engine.close()


@pytest.fixture
def pair(pair_shm: EnginePair) -> EnginePair:
    return pair_shm
