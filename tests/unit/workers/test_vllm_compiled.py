"""Compiled code on a CPU: which code fits, and how a process makes it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.compiler
from vllm.compilation import caching

from pdserve.config import WorkerConfig
from tests.support.timeouts import WAIT_S
from workers.make_engine import vllm_settings
from workers.vllm.patches import compiled
from workers.vllm.start.compiled_code import why_not


def test_code_is_loaded_only_for_its_threads_and_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda: None)
    monkeypatch.setattr(caching, "aot_compile_hash_factors", lambda _: ["vllm's"])
    compiled.mend_compiled()
    config: Any = None
    found = [caching.aot_compile_hash_factors(config)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    found.append(caching.aot_compile_hash_factors(config))
    monkeypatch.setattr(compiled, "cpu_digest", lambda: "another")
    found.append(caching.aot_compile_hash_factors(config))
    assert len({tuple(x) for x in found}) == 3
    assert {x[0] for x in found} == {"vllm's"}


@pytest.mark.parametrize(
    ("compilation", "expected"),
    [("auto", {}), ("eager", {"enforce_eager": True}), ("compiled", {"enforce_eager": False})],
)
def test_one_key_says_how_the_model_runs(compilation: Any, expected: dict[str, bool]) -> None:
    settings = vllm_settings(WorkerConfig(compilation=compilation, engine_args={"seed": 1}))
    assert settings.engine_args == {"seed": 1, **expected}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ({}, ""),
        ({"is_moe": True}, "experts"),
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "states"),
        ({"is_attention_free": True}, "states"),
        ({"is_multimodal_model": True}, "images"),
        ({"quantization": "fp8"}, "quantized"),
    ],
)
def test_models_whose_hand_over_is_not_tested_compiled_are_named(
    kind: dict[str, object], named: str
) -> None:
    flags = ("is_moe", "use_mla", "is_hybrid", "is_attention_free", "is_multimodal_model")
    model = SimpleNamespace(**{**dict.fromkeys(flags, False), "quantization": None, **kind})
    config: Any = SimpleNamespace(model_config=model)
    assert named in why_not(config)
    assert bool(why_not(config)) is bool(kind)


_LOWERED = """
import psutil
from workers.vllm.start.compiled_code import yield_to_others
yield_to_others()
itself = psutil.Process()
print(itself.nice(), itself.ionice().ioclass.name)
"""


def test_code_is_made_at_the_lowest_priority() -> None:
    command = [sys.executable, "-c", _LOWERED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["19", "IOPRIO_CLASS_IDLE"]
