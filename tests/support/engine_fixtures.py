"""Models and engines shared by the vLLM tests. Loading an engine takes seconds, so the engines live
for the whole session. Every test must leave them empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import pytest_asyncio

from kv_transfer.settings import ConnectorConfig
from tests.support.engine_pair import EnginePair
from tests.support.engines import EngineProcess, settings
from tests.support.timeouts import WAIT_S
from tests.support.tiny_models import ModelSpec, make_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Tests wait for the end of this lease if it must free the blocks; all others end earlier.
LEASE_S = WAIT_S / 3


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a float32 model with 4 layers and 2 KV heads, context 4096."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", ModelSpec())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def aggregated(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """Start one engine without a KV connector; prompts are chunked at 256 tokens."""
    engine = await EngineProcess.start(settings(tiny_model, max_num_batched_tokens=256))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prefill(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """Start a prefill engine that can send over every transport."""
    kv = ConnectorConfig(transports=("shm", "tcp"), hold_s=LEASE_S)
    engine = await EngineProcess.start(
        settings(tiny_model, kv=kv, instance_id="prefill-instance", max_num_batched_tokens=256)
    )
    yield engine
    await engine.close()


async def _decode(model: Path, transport: Literal["shm", "tcp"]) -> EngineProcess:
    kv, name = ConnectorConfig(transports=(transport,)), f"decode-instance-{transport}"
    return await EngineProcess.start(
        settings(model, kv=kv, instance_id=name, max_num_batched_tokens=256)
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair_shm(prefill: EngineProcess, tiny_model: Path) -> AsyncIterator[EnginePair]:
    """Start a pair that transfers KV through shared memory."""
    decode = await _decode(tiny_model, "shm")
    yield EnginePair(prefill, decode, "prefill-instance")
    await decode.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair_tcp(prefill: EngineProcess, tiny_model: Path) -> AsyncIterator[EnginePair]:
    """Start a pair that transfers KV over TCP."""
    decode = await _decode(tiny_model, "tcp")
    yield EnginePair(prefill, decode, "prefill-instance")
    await decode.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> EnginePair:
    """Return the pair of each transport in turn."""
    found: EnginePair = request.getfixturevalue(f"pair_{request.param}")
    return found


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the order for an engine with corrupt.py, which reads it at each
    chunk."""
    path = tmp_path_factory.mktemp("orders") / "order"
    path.write_text("", encoding="ascii")
    return path
