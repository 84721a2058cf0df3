"""Models and engines that the vLLM tests share. Loading an engine takes seconds, so they live for
the whole session, and every test leaves them empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.e2e.engines import EngineProcess, settings
from tests.e2e.models import ModelSpec, make_model
from tests.e2e.pair import Pair
from tests.patience import WAIT_S
from workers.vllm.settings import KvSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Tests wait this out where a lease frees the blocks; where it must not, they are done before.
LEASE_S = WAIT_S / 3


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model of 4 layers and 2 KV heads, context 4096."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", ModelSpec())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def aggregated(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """One engine without a KV connector, prompts chunked at 256 tokens."""
    engine = await EngineProcess.start(settings(tiny_model, max_num_batched_tokens=256))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prefill(tiny_model: Path) -> AsyncIterator[EngineProcess]:
    """A prefill engine that can send over every transport."""
    kv = KvSettings("prefill-instance", {"transports": ("shm", "tcp"), "lease_s": LEASE_S})
    engine = await EngineProcess.start(settings(tiny_model, kv=kv, max_num_batched_tokens=256))
    yield engine
    await engine.close()


async def _decode(model: Path, transport: str) -> EngineProcess:
    kv = KvSettings(f"decode-instance-{transport}", {"transports": (transport,)})
    return await EngineProcess.start(settings(model, kv=kv, max_num_batched_tokens=256))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair_shm(prefill: EngineProcess, tiny_model: Path) -> AsyncIterator[Pair]:
    """KV through shared memory."""
    decode = await _decode(tiny_model, "shm")
    yield Pair(prefill, decode, "prefill-instance")
    await decode.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair_tcp(prefill: EngineProcess, tiny_model: Path) -> AsyncIterator[Pair]:
    """KV over TCP."""
    decode = await _decode(tiny_model, "tcp")
    yield Pair(prefill, decode, "prefill-instance")
    await decode.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Each of the two ways for KV."""
    found: Pair = request.getfixturevalue(f"pair_{request.param}")
    return found


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine with corrupt.py is to do with the KV that it sends; it looks at each chunk."""
    path = tmp_path_factory.mktemp("orders") / "order"
    path.write_text("", encoding="ascii")
    return path
