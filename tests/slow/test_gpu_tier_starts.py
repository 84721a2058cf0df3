"""The GPU tests on a machine that has pytest and torch, and neither vLLM nor the other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_START = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["tests/gpu", "-rs"]))
"""


def test_the_gpu_tests_start_without_vllm_and_say_what_they_skip() -> None:
    absent = ["vllm", "pytest_asyncio", "xdist", "hypothesis", "pytest_timeout", "pynvml"]
    done = subprocess.run(
        [sys.executable, "-c", _START.format(absent=absent)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch finds no CUDA GPU" in done.stdout
    assert "could not import 'pytest_asyncio'" in done.stdout
