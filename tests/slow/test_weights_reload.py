"""Weights that change in place on real vLLM: tokens equal those of engines that started with them,
nothing of old KV is used, and an answer that is kept continues with the new weights. A difference
back to the first weights gives the first tokens. The updates are made with trainers' calls."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR
from pdserve.model.weight_deltas import WeightFiles, write_delta
from pdserve.types import SamplingParams
from tests.support.cluster import Cluster
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from tests.support.started_workers import vllm
from tests.support.trainers import Engines

PROMPT = list(range(20, 200))
PLAIN = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def trained(target: Path, seed: int, model: Path = Path(MODEL_DIR)) -> Path:
    """Write a copy of a model, by default the demo, with other weights. The demo's output layer is
    tied to its input embedding, so both have to take the new weight."""
    shutil.copytree(model, target)
    file = next(target.glob("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (x + 0.05 * torch.randn(x.shape, generator=generator).to(x.dtype)).contiguous()
        for name, x in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return target


async def test_tokens_after_an_update_are_those_of_engines_with_the_new_weights(
    tmp_path: Path,
) -> None:
    router = {"weights": {"directories": [str(tmp_path)], "mode": "keep"}}
    async with Cluster(
        engine=vllm(MODEL_DIR), router=router, worker={"weights_directories": [str(tmp_path)]}
    ) as service:
        # On disk, where KV of the old weights would outlive everything else.
        tier = {"host_gib": 0.03, "disk_path": str(tmp_path / "tier"), "disk_gib": 0.1}
        await service.add("prefill-0", kv={"tiers": tier})
        await service.add("decode-0")
        await service.until_ready()
        served = next(iter((await service.entries()).values())).info.model.name
        (first,) = await service.open(PROMPT, PLAIN).end()
        versions = ["default"]
        while True:
            versions.append(str(len(versions)))
            new = trained(tmp_path / f"step-{len(versions)}", len(versions))
            kept = service.open(PROMPT, PLAIN)
            await kept.until(40)
            async with Engines([service.http] * 2) as engines:
                await engines.prime_rl_ready(served)
                await engines.prime_rl_update(new)
                (shown, _) = await engines.call("GET", "/weight_info")
            assert (shown["weight_version"], shown["laggards"]) == (versions[-1], {})
            (mixed,) = await kept.end()
            if kept.receipt.spans and kept.receipt.spans[-1].version == versions[-1]:
                break  # else the answer ended before the update
        (whole,) = await service.open(PROMPT, PLAIN).end()
        old = kept.receipt.spans[:2]
        assert [x.version for x in old] == [versions[-2]] * 2
        write_delta(new, Path(MODEL_DIR), tmp_path / "back")
        async with Engines([service.http] * 2) as engines:
            await engines.slime_ready()
            await engines.slime_update(tmp_path / "back", 99, keeps_files=True)
            assert await engines.slime_versions() == {"99"}
        (back,) = await service.open(PROMPT, PLAIN).end()
        assert back.token_ids == first.token_ids
    oracle = await EngineProcess.start(settings(new, max_num_batched_tokens=256))
    try:
        assert whole.token_ids == (await oracle.run(PROMPT, PLAIN)).token_ids
        before = mixed.token_ids[: old[-1].end]
        after = await oracle.run(PROMPT, PLAIN, resume=before)
        assert mixed.token_ids == (*before, *after.token_ids)
    finally:
        await oracle.close()
    assert whole.token_ids != first.token_ids
    assert 40 <= len(before) < PLAIN.max_tokens


async def test_weights_loaded_in_advance_are_those_of_engines_with_the_new_weights(
    tmp_path: Path,
) -> None:
    model = Path(MODEL_DIR)
    new = [trained(tmp_path / str(seed), seed) for seed in (1, 2)]
    write_delta(new[1], model, tmp_path / "back")
    served = await EngineProcess.start(settings(MODEL_DIR, max_num_batched_tokens=256))
    oracle = await EngineProcess.start(settings(new[1], max_num_batched_tokens=256))
    try:
        first = await served.run(PROMPT, PLAIN)
        # The first of two that are loaded in advance is freed, as after an update that failed.
        assert await served.stage_weights(WeightFiles(str(new[0])))
        stream = served.submit(PROMPT, PLAIN)
        assert await served.stage_weights(WeightFiles(str(new[1])))
        assert (await served.collect(stream)).token_ids == first.token_ids
        await served.update_weights(WeightFiles(str(new[1])))
        expected = await oracle.run(PROMPT, PLAIN)
        assert (await served.run(PROMPT, PLAIN)).token_ids == expected.token_ids
        assert expected.token_ids != first.token_ids
        # A difference; then weights that were not loaded in advance.
        back = WeightFiles(str(new[1]), (str(tmp_path / "back"),))
        assert await served.stage_weights(back)
        await served.update_weights(back)
        assert (await served.run(PROMPT, PLAIN)).token_ids == first.token_ids
        await served.update_weights(WeightFiles(str(new[1])))
        assert (await served.run(PROMPT, PLAIN)).token_ids == expected.token_ids
    finally:
        await asyncio.gather(served.close(), oracle.close())


async def test_a_model_whose_layers_are_packed_otherwise_is_loaded_in_the_update(
    tmp_path: Path,
) -> None:
    model = await make_kind(tmp_path / "made", "Qwen3-MoE")
    new = trained(tmp_path / "1", 1, model)
    served = await EngineProcess.start(settings(model, max_num_batched_tokens=256))
    try:
        assert not await served.stage_weights(WeightFiles(str(new)))
        await served.update_weights(WeightFiles(str(new)))
        assert len((await served.run(PROMPT, PLAIN)).token_ids) == PLAIN.max_tokens
    finally:
        await served.close()
