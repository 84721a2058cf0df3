"""What one GPU can show of the GPU transports, easiest first; each in a process of its own, for
exhausted thread blocks and dead peers hang. Two ranks on one GPU are slow and say nothing of two
GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_transfer.nccl import binding
from kv_transfer.transport.nccl import ONE_GPU_VARIABLE, ONE_GPU_VERSION

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
ONE_GPU = {ONE_GPU_VARIABLE: "1", "NCCL_MAX_CTAS": "4"}
NO_P2P = {**ONE_GPU, "NCCL_P2P_DISABLE": "1"}
NET = {**NO_P2P, "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]


def lack(transport: str) -> str:
    """Why the transport cannot be tried here, or ""."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if transport == "nccl":
        try:
            version = binding.load().version()
        except binding.NcclUnavailable as error:
            return str(error)
        if version < ONE_GPU_VERSION:
            return f"NCCL {version} refuses two ranks on one GPU: {ONE_GPU_VERSION} is the first"
    return ""


def run(role: str, transport: str, environment: dict[str, str]) -> None:
    if reason := lack(transport):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.gpu_transfer", role, transport],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr[-4000:]


@pytest.mark.parametrize(
    ("role", "transport", "environment"),
    [
        pytest.param("both", "nccl", ONE_GPU, id="nccl-two-ranks-in-one-process"),
        pytest.param("target", "nccl", ONE_GPU, id="nccl-two-processes"),
        pytest.param("target", "nccl", NO_P2P, id="nccl-through-host-memory"),
        pytest.param("target", "nccl", NET, id="nccl-through-sockets"),
        pytest.param("kill", "nccl", ONE_GPU, id="nccl-peer-killed"),
    ],
)
def test_blocks_arrive_exactly(role: str, transport: str, environment: dict[str, str]) -> None:
    run(role, transport, environment)


def test_two_processes_under_mps(tmp_path: Path) -> None:
    """Their kernels run at one time; without it they take turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if reason := lack("nccl"):
        pytest.skip(reason)
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path)}
    environment = {**os.environ, **pipes}
    started = subprocess.run([control, "-d"], env=environment, timeout=30, check=False)
    if started.returncode:
        pytest.skip("an MPS daemon cannot be started here")
    try:
        share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "45"}
        run("target", "nccl", {**ONE_GPU, **pipes, **share})
    finally:
        quit_ = {"input": "quit\n", "text": True, "timeout": 30}
        subprocess.run([control], env=environment, check=False, **quit_)  # type: ignore[call-overload]
