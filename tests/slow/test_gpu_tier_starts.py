"""`make test-gpu` on a machine with pytest and torch, without .venv, vLLM and plugins of pytest."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tests.support.commands import ROOT, run
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from pathlib import Path

# A module that is None in sys.modules cannot be imported.
ABSENT = """import sys
sys.modules.update(dict.fromkeys(["vllm", "pytest_asyncio", "xdist", "hypothesis", "pynvml"]))
"""


def test_the_gpu_tests_start_without_vllm_and_say_what_they_skip(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **own, "PYTHONPATH": str(tmp_path)}
    command = ["make", "test-gpu", f"VENV={tmp_path}/none", f"PYTHON={sys.executable}"]
    command.append("GPU_SHIM=.venv-none")
    told = run(*command, cwd=ROOT, env=environment, within_s=START_S)
    assert "torch finds no CUDA GPU" in told
    assert "could not import 'pytest_asyncio'" in told
