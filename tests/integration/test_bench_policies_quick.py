"""`python -m benchmarks.policies --quick`: every arm of real processes, with scripted engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.patience import HUNG_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(HUNG_S)


def test_a_quick_run_drives_every_arm_and_says_its_verdict(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.policies", "--quick", "--only", "mix"]
    command += ["--policies", "slo_aware,always_local", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # A busy machine may spoil the run, or make either arm look worse.
    assert done.returncode in (0, 1, 3), done.stderr
    assert "mix: slo_aware is " in done.stdout
    assert done.stdout.count("18 of 18 requests ok") == 2
    assert (tmp_path / "mix" / "report.html").exists()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.policies", "--quick", "--only", "mix"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_ends_it_in_a_word_and_leaves_no_process(running: subprocess.Popen[str]) -> None:
    ends_at = time.monotonic() + WAIT_S
    children: list[psutil.Process] = []
    while not children:
        assert running.poll() is None
        assert time.monotonic() < ends_at
        children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130, said
    assert "benchmarks.policies: interrupted" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, WAIT_S)
    assert alive == []
