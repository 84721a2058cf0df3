"""What one GPU can show of the NCCL transport, in processes of their own: a GPU that runs out of
thread blocks, or a dead peer, would hang the test. Two ranks on one GPU say nothing of the speed
between two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_transfer.errors import KvTransferError
from kv_transfer.transport import nccl_binding
from kv_transfer.transport.nccl import ONE_GPU_VARIABLE, ONE_GPU_VERSION

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
ONE_GPU = {ONE_GPU_VARIABLE: "1"}
NO_P2P = {**ONE_GPU, "NCCL_P2P_DISABLE": "1"}
NET = {**NO_P2P, "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]


def lack() -> str:
    """Return why NCCL cannot be tried here, or ""."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    try:
        version = nccl_binding.load().version()
    except KvTransferError as error:
        return str(error)
    if version < ONE_GPU_VERSION:
        return f"NCCL {version} refuses two ranks on one GPU: {ONE_GPU_VERSION} is the first"
    return ""


@pytest.mark.parametrize(
    ("role", "environment"),
    [
        pytest.param("consumer", ONE_GPU, id="direct"),
        pytest.param("consumer", NO_P2P, id="through-host-memory"),
        pytest.param("consumer", NET, id="through-sockets"),
        pytest.param("kill", ONE_GPU, id="peer-killed"),
    ],
)
def test_blocks_arrive_exactly(role: str, environment: dict[str, str]) -> None:
    if reason := lack():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.gpu_transfer", role],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr[-4000:]
