"""The promises of hand-offs hold with asynchronous scheduling, as on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.e2e.engines import EngineProcess, settings
from tests.e2e.fixtures import LEASE_S
from tests.e2e.pair import Pair
from tests.e2e.test_engine_promises import *  # noqa: F403
from tests.e2e.test_handoff_exact import *  # noqa: F403
from tests.e2e.test_handoff_release import *  # noqa: F403
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair_shm(tiny_model: Path) -> AsyncIterator[Pair]:
    """Both engines schedule asynchronously."""
    engines = [
        await EngineProcess.start(
            settings(
                tiny_model,
                kv=KvSettings(name, {"transports": ("shm",), "lease_s": LEASE_S}),
                max_num_batched_tokens=256,
            ),
            env={"PDSERVE_TEST_BATCH_QUEUE": "1"},
        )
        for name in ("p", "d")
    ]
    assert {x.info.settings["async_scheduling"] for x in engines} == {"True"}
    yield Pair(*engines, "p")
    for engine in engines:
        await engine.close()


@pytest.fixture
def pair(pair_shm: Pair) -> Pair:
    return pair_shm
