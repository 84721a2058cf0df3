"""Weights that change in place on real vLLM: tokens equal those of engines that started with them,
nothing of old KV is used, and an answer that is kept continues with the new weights: computed
again, or with the KV that it has, as one engine of vLLM that loads them in the middle. A difference
back to the first weights gives the first tokens. The updates are made with trainers' calls."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from pdserve.demo import MODEL_DIR
from pdserve.model.weight_deltas import WeightFiles, write_delta
from pdserve.types import SamplingParams
from tests.support.cluster import Cluster
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import make_kind
from tests.support.processes import start_python
from tests.support.started_workers import vllm
from tests.support.timeouts import START_S
from tests.support.trainers import Engines

if TYPE_CHECKING:
    from pdserve.types import Receipt

PROMPT = list(range(20, 200))
PLAIN = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


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


def assert_positions(receipt: Receipt) -> list[str]:
    """Assert that one decode worker sampled with older KV after an update, and counted it. Return
    the versions of its tokens."""
    _, decoded, stale = receipt.spans
    assert decoded.worker == stale.worker == "decode-0"
    assert receipt.stale_kv_tokens == stale.stale_kv_tokens == len(PROMPT) + stale.start - 1
    return [decoded.version, stale.version]


async def reloaded(model: Path, new: Path, at: int, target: Path) -> tuple[int, ...]:
    """Return the answer of one engine of vLLM, whose weights change before token `at`."""
    args = (model, new, at, PLAIN.max_tokens, target, *PROMPT)
    one = await start_python("tests.support.reloading_engine", *map(str, args))
    assert await asyncio.wait_for(one.wait(), START_S) == 0
    return tuple(json.loads(target.read_text()))


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
        versions, new = ["default"], Path(MODEL_DIR)
        while True:
            versions.append(str(len(versions)))
            old_model, new = new, trained(tmp_path / f"step-{len(versions)}", len(versions))
            kept = service.open(PROMPT, PLAIN)
            allowed = service.open(PROMPT, PLAIN, stale_kv="allow")
            await asyncio.gather(kept.until(40), allowed.until(40))
            async with Engines([service.http] * 2) as engines:
                await engines.prime_rl_ready(served)
                await engines.prime_rl_update(new)
                (shown, _) = await engines.call("GET", "/weight_info")
            assert (shown["weight_version"], shown["laggards"]) == (versions[-1], {})
            (mixed,) = await kept.end()
            (grown,) = await allowed.end()
            ends = [x.receipt.spans[-1:] for x in (kept, allowed)]
            if all(x and x[0].version == versions[-1] for x in ends):
                break  # else an answer ended before the update
        (whole,) = await service.open(PROMPT, PLAIN).end()
        (later,) = await service.open([*PROMPT, *grown.token_ids], SHORT).end()
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
        # Blocks that the answer cached after the update are not used by others.
        prompt = [*PROMPT, *grown.token_ids]
        assert later.token_ids == (await oracle.run(prompt, SHORT)).token_ids
        start = allowed.receipt.spans[-1].start
        before = grown.token_ids[:start]
        again = await oracle.run(PROMPT, PLAIN, resume=before)
        assert grown.token_ids != (*before, *again.token_ids)
    finally:
        await oracle.close()
    assert whole.token_ids != first.token_ids
    assert 40 <= old[-1].end < PLAIN.max_tokens
    assert kept.receipt.stale_kv_tokens == 0
    assert versions[-2:] == assert_positions(allowed.receipt)
    assert allowed.fallbacks == ()
    assert grown.token_ids == await reloaded(old_model, new, start, tmp_path / "tokens.json")


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
