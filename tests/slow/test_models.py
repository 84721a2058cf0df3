"""Each kind of model through prefill and decode, as docs/models.md says."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.e2e import kind_checks
from tests.e2e.engines import EngineProcess, settings
from tests.e2e.kinds import KINDS, make_kind
from tests.e2e.models import write_tokenizer
from tests.slow.model_matrix import EXACT, PAGE, row, tried

if TYPE_CHECKING:
    from pathlib import Path

# One of windows, one of states.
SOME = ["Gemma-2", "Granite-hybrid"]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model_is_handed_over_exactly(name: str) -> None:
    try:
        found = tried(name)
    except subprocess.CalledProcessError as error:
        if "torchvision" not in str(error.cmd):
            raise
        pytest.skip("the package index has no torchvision")
    assert set(found.values()) == {EXACT}, found
    assert row(name, found) in PAGE.read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", SOME)
async def test_requests_that_are_preempted_are_exact(name: str, tmp_path: Path) -> None:
    model = make_kind(tmp_path / "model", name)
    more = {"max_model_len": 1024, "kv_cache_memory_bytes": 6 << 20, **KINDS[name].engine_args}
    async with kind_checks.subject(model, **more) as of:
        await kind_checks.check_pressure(of)


@pytest.mark.parametrize("name", SOME)
async def test_kinds_are_exact_with_asynchronous_scheduling(name: str, tmp_path: Path) -> None:
    """As on a GPU. A stream with a state cannot be moved then: a step is always in flight."""
    model, env = make_kind(tmp_path / "model", name), {"PDSERVE_TEST_BATCH_QUEUE": "1"}
    async with kind_checks.subject(model, env=env, **KINDS[name].engine_args) as of:
        await kind_checks.check_lengths(of)
        await kind_checks.check_prefix_hits(of)
        await kind_checks.check_resumed(of)
        await kind_checks.check_cancels(of)


@pytest.mark.parametrize("name", SOME)
async def test_a_stream_goes_on_when_its_decode_worker_is_killed(name: str, tmp_path: Path) -> None:
    model = make_kind(tmp_path / "model", name)
    async with kind_checks.subject(model, **KINDS[name].engine_args) as of:
        await kind_checks.check_kills(of)


@pytest.mark.parametrize("name", SOME)
async def test_a_prefill_worker_killed_in_a_handoff_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    model = make_kind(tmp_path / "model", name)
    async with kind_checks.subject(model, **KINDS[name].engine_args) as of:
        await kind_checks.check_killed_prefill(of)


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
