"""Kinds of models through prefill and decode, as docs/models.md says."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import model_kind_checks
from tests.support.engines import EngineProcess, settings
from tests.support.model_kinds import KINDS, make_kind
from tests.support.model_matrix import EXACT, PAGE, check_kind, rows_of
from tests.support.tiny_models import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# One of windows, one of states.
SOME = ["Gemma-2", "Granite-hybrid"]
# The first kind of each KV cache and image processor: two that are equal in both take the same path
# through the connector. The table's script tries all.
EACH = {(kind.cache, kind.processor): name for name, kind in reversed(KINDS.items())}


@pytest.mark.parametrize("name", sorted(EACH.values(), key=list(KINDS).index))
def test_a_kind_of_model_is_handed_over_exactly(name: str) -> None:
    try:
        found = check_kind(name)
    except subprocess.CalledProcessError as error:
        if "torchvision" not in str(error.cmd):
            raise
        pytest.skip("the package index has no torchvision")
    assert set(found.values()) == {EXACT}, found
    told = rows_of(PAGE.read_text("utf-8"))[name]
    assert {**told, **found} == told


@pytest.mark.parametrize("name", SOME)
async def test_requests_that_are_preempted_are_exact(name: str, tmp_path: Path) -> None:
    model = await make_kind(tmp_path / "model", name)
    more = {"max_model_len": 1024, "kv_cache_memory_bytes": 6 << 20, **KINDS[name].engine_args}
    async with model_kind_checks.kind_engines(model, **more) as of:
        await model_kind_checks.check_pressure(of)


@pytest.mark.parametrize("name", SOME)
async def test_kinds_are_exact_with_asynchronous_scheduling(name: str, tmp_path: Path) -> None:
    """This is the default on GPUs. A stream with a state cannot be moved: a step is always in
    flight."""
    model, env = await make_kind(tmp_path / "model", name), {"PDSERVE_TEST_ASYNC_SCHEDULING": "1"}
    async with model_kind_checks.kind_engines(model, env=env, **KINDS[name].engine_args) as of:
        await model_kind_checks.check_lengths(of)
        await model_kind_checks.check_prefix_hits(of)
        await model_kind_checks.check_resumed(of)
        await model_kind_checks.check_cancels(of)
        await model_kind_checks.check_kills(of)


async def test_a_prefill_worker_killed_in_a_handoff_leaves_nothing(tmp_path: Path) -> None:
    """Neither of the blocks of full attention nor of the states."""
    model = await make_kind(tmp_path / "model", "Granite-hybrid")
    async with model_kind_checks.kind_engines(model, **KINDS["Granite-hybrid"].engine_args) as of:
        await model_kind_checks.check_killed_prefill(of)


@pytest.mark.parametrize(
    ("name", "engine_args", "refusal", "failure"),
    [
        (
            "Qwen3-Next",
            {"dtype": "float32"},
            "engine_args.dtype must be bfloat16",
            "AssertionError: CPU GDN attention requires BF16",
        ),
        (
            "Granite-hybrid",
            {"enable_prefix_caching": True},
            "engine_args.enable_prefix_caching must be false",
            "IndexError",
        ),
    ],
)
async def test_an_engine_that_cannot_compute_does_not_start(
    name: str, engine_args: dict[str, Any], refusal: str, failure: str, tmp_path: Path
) -> None:
    """A known limit is refused with the setting that helps, an unknown one by the self-test."""
    chosen = settings(await make_kind(tmp_path / "model", name), **engine_args)
    with pytest.raises(RuntimeError, match=f"^ConfigError: {refusal}"):
        await EngineProcess.start(chosen)
    with pytest.raises(RuntimeError, match=f"^WorkerFailed: the engine cannot compute: {failure}"):
        await EngineProcess.start(chosen, env={"PDSERVE_TEST_UNCHECKED_SETTINGS": "1"})


@pytest.mark.parametrize(
    ("name", "engine_args", "chosen"),
    [
        ("Granite-hybrid", {}, "enable_prefix_caching: false for Mamba-2 layers on a CPU"),
        (
            "Qwen3-Next",
            {"dtype": "auto"},
            "dtype: bfloat16 for the gated delta net of this model on a CPU",
        ),
    ],
)
async def test_what_a_model_needs_is_set_unless_somebody_has_set_it(
    name: str, engine_args: dict[str, Any], chosen: str, tmp_path: Path
) -> None:
    model = await make_kind(tmp_path / "model", name)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16"}))
    engine = await EngineProcess.start(settings(model, **engine_args))
    assert engine.info.settings["set_for_model"] == chosen
    assert (await engine.run(range(3, 90))).error is None
    await engine.close()


async def test_a_multimodal_model_without_torchvision_is_refused(tmp_path: Path) -> None:
    if find_spec("torchvision"):
        pytest.skip("torchvision is installed")
    model = tmp_path / "model"
    write_tokenizer(model, 128)
    shape = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (model / "config.json").write_text(json.dumps(shape))
    env = {"VLLM_CACHE_ROOT": str(tmp_path)}  # vLLM remembers what it knows of architectures
    with pytest.raises(RuntimeError, match=r"^ConfigError: model: .* needs torchvision"):
        await EngineProcess.start(settings(model), env=env)
