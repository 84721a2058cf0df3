"""A step of `make gpu-report`: what is said of it, however its process ends."""

from __future__ import annotations

import sys
import time

import pytest

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
