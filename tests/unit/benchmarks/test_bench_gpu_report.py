"""A step of `make gpu-report`: what is said of it, however its process ends."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.micro import gpu_cache, kv
from benchmarks.micro.gpu_report import ReportStep, missing, run_step
from tests.support.timeouts import WAIT_S

ROWS = 'print(\'noise\\n{"rows": [{"a": 1}], "notes": ["n"]}\')'
FAILS = "import sys; sys.stderr.write('error: no card\\n'); sys.exit({})"


@pytest.mark.parametrize(
    ("script", "limit_s", "status", "reason"),
    [
        (ROWS, WAIT_S, "ran", ""),
        (FAILS.format(2), WAIT_S, "not run", "no card"),
        ("raise ValueError('x')", WAIT_S, "failed", "ValueError: x"),
        ("import time; time.sleep(600)", 1.0, "timed out", "after 1 s"),
        (ROWS, 0.0, "not run", "no time was left"),
    ],
)
def test_a_step_says_why_it_did_not_run(
    script: str, limit_s: float, status: str, reason: str
) -> None:
    step = ReportStep("part", "step", "micro", ("-c", script), limit_s)
    outcome = run_step(step, sys.executable, time.monotonic() + WAIT_S)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.rows == ([{"a": 1}] if status == "ran" else [])


def test_a_step_needs_what_its_machine_has() -> None:
    step = ReportStep("part", "step", "micro", (), 1.0, ("gpu", "kernels"))
    assert missing(step, {"gpu": "", "kernels": "", "vllm": "none"}) == ""
    assert missing(step, {"gpu": "", "kernels": "none"}) == "none"


@pytest.mark.parametrize(("count", "seen"), [(1, ("0", "0")), (4, ("0", "3"))])
def test_the_two_processes_of_a_transport_see_their_own_gpu_alone(
    count: int, seen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers do, so `cuda_ipc` maps the memory of a GPU that CUDA does not show."""
    monkeypatch.setattr(kv, "visible_gpus", lambda: dict.fromkeys(range(count)))
    monkeypatch.setattr(gpu_cache, "missing_gpu", lambda: "there is no GPU")
    case: Any = None
    found = []
    for role in (kv.PRODUCER, kv.CONSUMER):
        environment: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(BenchError, match="there is no GPU"):
            kv._on_gpu(role, case)
        found.append(environment["CUDA_VISIBLE_DEVICES"])
        assert ("NCCL_MULTI_RANK_GPU_ENABLE" in environment) == (count == 1)
    assert tuple(found) == seen
