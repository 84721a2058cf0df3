"""LoRA adapters of an engine whose model runs in two processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest
from tests.support.engine_pair import params, prompt
from tests.support.engines import EngineProcess, settings
from tests.support.tiny_models import make_adapter
from workers.control.loaded_adapters import read_adapter

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_one_batch_keeps_adapters_apart_after_one_could_not_be_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = await EngineProcess.start(settings(tiny_model, tensor_parallel_size=2, **lora))
    try:
        wide = read_adapter("wide", str(make_adapter(tmp_path / "wide", 9, rank=16)), "tiny")
        with pytest.raises(InvalidRequest, match="rank 16 is greater"):
            await engine.load_adapter(wide)
        keys = [""]
        for seed in (1, 2):
            path = make_adapter(tmp_path / str(seed), seed)
            adapter = read_adapter(path.name, str(path), "tiny")
            await engine.load_adapter(adapter)
            keys.append(adapter.key)
        ids, sampling = prompt(100, 7), params(24, ignore_eos=True)
        alone = [(await engine.run(ids, sampling, adapter=key)).token_ids for key in keys]
        runs = (engine.run(ids, sampling, adapter=key) for key in keys)
        assert [x.token_ids for x in await asyncio.gather(*runs)] == alone
        assert len(set(alone)) == len(keys)
    finally:
        await engine.close()
