"""The tests of tests/gpu, on a CUDA runtime that is no GPU's (tests/gpu/shim)."""

from __future__ import annotations

import os

import pytest

from tests.support.commands import ROOT, run
from tests.support.timeouts import START_S

SHIM = ROOT / ".venv-gpu-shim"
pytestmark = pytest.mark.skipif(
    not (SHIM / "shim").exists(), reason="needs .venv-gpu-shim, which `make gpu-shim` makes"
)


def test_the_gpu_tests_pass_and_say_that_no_gpu_ran_them() -> None:
    command = [SHIM / "bin" / "python", "-m", "pytest", "tests/gpu", "-rs"]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    told = run(*command, cwd=ROOT, env={**os.environ, **own}, within_s=START_S)
    assert "passed on the CUDA shim: kernels and times are not real" in told
