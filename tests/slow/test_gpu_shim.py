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


# Each operation of a stream waits up to so long, so that streams come to theirs in all orders. A
# test of an order finds nothing without the delays that it does not find with them.
DELAYED = {"CUDA_SHIM_DELAY_US": "3000"}
ORDERED = "whole-gqa or next_step or exactly or shim_nccl"
ENGINES = "tests/gpu/test_shim_engines.py"


def passed(*chosen: str, **environment: str) -> str:
    """Run the tests of tests/gpu that are chosen. Return what pytest said."""
    command = [SHIM / "bin" / "python", "-m", "pytest", "-rs", *chosen]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", **environment}
    told = run(*command, cwd=ROOT, env={**os.environ, **own}, within_s=2 * START_S)
    assert "passed on the CUDA shim: kernels and times are not real" in told
    return told


@pytest.mark.parametrize(
    ("chosen", "environment"),
    [
        pytest.param(["-k", f"not ({ORDERED})"], {}, id="bytes"),
        pytest.param(["-k", ORDERED], DELAYED, id="orders"),
    ],
)
def test_the_gpu_tests_pass_and_say_that_no_gpu_ran_them(
    chosen: list[str], environment: dict[str, str]
) -> None:
    passed("tests/gpu", f"--ignore={ENGINES}", *chosen, **environment)


@pytest.mark.skipif(
    not list(SHIM.glob("lib/python*/site-packages/vllm")),
    reason="needs vLLM's build for CUDA in .venv-gpu-shim: `make gpu-shim`",
)
def test_engines_of_vllms_build_for_cuda_hand_kv_over() -> None:
    assert "skipped" not in passed(ENGINES)
