"""What `make test-gpu` runs, over devices in host memory: so that a GPU finds no mistake but its
own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("role", "transport"),
    [("both", "nccl"), ("both", "cuda_ipc"), ("target", "cuda_ipc"), ("kill", "cuda_ipc")],
)
def test_blocks_arrive_exactly(role: str, transport: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kv_transfer.gpu_dry_run", role, transport],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr[-4000:]
