"""The GPU tests on a machine that has pytest and torch, and neither vLLM nor pytest's plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A module that is None in sys.modules cannot be imported.
START = """
import sys
sys.modules.update(dict.fromkeys(["vllm", "pytest_asyncio", "xdist", "hypothesis", "pynvml"]))
import pytest
sys.exit(pytest.main(["tests/gpu", "-rs"]))
"""


def test_the_gpu_tests_start_without_vllm_and_say_what_they_skip() -> None:
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    command, root = [sys.executable, "-c", START], Path(__file__).resolve().parents[2]
    environment = {**os.environ, **own}
    done = subprocess.run(command, cwd=root, env=environment, stdout=-1, timeout=300, check=True)
    assert b"torch finds no CUDA GPU" in done.stdout
    assert b"could not import 'pytest_asyncio'" in done.stdout
