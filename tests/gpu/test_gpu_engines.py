"""Real engines that share one GPU: KV moves over `cuda_ipc`, and the tokens are those of one
engine."""

from __future__ import annotations

import importlib.util
import itertools
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

for _module in ("torch", "msgspec", "grpc", "pytest_asyncio"):
    pytest.importorskip(_module)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import pytest_asyncio  # noqa: E402

from kv_transfer.settings import ConnectorConfig  # noqa: E402
from tests.support.engine_pair import EnginePair, joined, params, prompt  # noqa: E402
from tests.support.engines import EngineProcess, settings  # noqa: E402
from tests.support.gpu_caches import is_shim, missing_gpu  # noqa: E402
from tests.support.tiny_models import ModelSpec, make_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
BLOCK = 16
_NAMES = itertools.count(1)


def lack() -> str:
    """Why engines cannot run on a GPU here, or ""."""
    if reason := missing_gpu():
        return reason
    if is_shim():
        return "vLLM's kernels do not run on the CUDA shim"
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "vLLM's GPU build is not installed"
    return ""


async def engine(model: Path, *, is_paired: bool = True) -> EngineProcess:
    kv = ConnectorConfig(transports=("cuda_ipc",))
    args: dict[str, Any] = {
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.15,
        "enforce_eager": True,
    }
    made = settings(
        model,
        kv=kv if is_paired else None,
        instance_id=f"gpu-instance-{next(_NAMES)}",
        **args,
    )
    return await EngineProcess.start(made)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[dict[str, EngineProcess]]:
    """Start the engines one after the other, because each measures the free memory."""
    if reason := lack():
        pytest.skip(reason)
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", ModelSpec(dtype="bfloat16"))
    made: dict[str, EngineProcess] = {}
    try:
        made["alone"] = await engine(model, is_paired=False)
        for name in ("first", "second"):
            made[name] = await engine(model)
        yield made
    finally:
        for each in made.values():
            await each.close()


async def test_tokens_are_those_of_one_engine(engines: dict[str, EngineProcess]) -> None:
    pair = EnginePair(engines["first"], engines["second"], engines["first"].instance_id)
    sampling = params(ignore_eos=True)
    # One at a time, so that all three engines compute in batches of the same shapes.
    for length in (1, BLOCK, BLOCK + 1, 257, 700):
        ids = prompt(length, next(_NAMES))
        expected = joined(await engines["alone"].run(ids, sampling))
        assert (await pair.run(ids, sampling)).token_ids == expected.token_ids
        report = pair.last[1].report
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.transport == "cuda_ipc"
        assert report.transfer.blocks == -(-length // BLOCK)
    await pair.until_empty()
