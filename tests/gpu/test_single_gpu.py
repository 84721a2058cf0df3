"""Transports between GPUs, as far as one GPU can show them, in child processes: a dead peer, or a
GPU without free thread blocks, would hang them. The speed does not predict that of two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("grpc")

from kv_transfer.errors import KvTransferError
from kv_transfer.transport.nccl import binding as nccl_binding
from kv_transfer.transport.nccl.transport import ONE_GPU_VARIABLE, ONE_GPU_VERSION
from tests.support.gpu_caches import is_shim, missing_gpu

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
ONE_GPU = {ONE_GPU_VARIABLE: "1"}
NO_P2P = {**ONE_GPU, "NCCL_P2P_DISABLE": "1"}
NET = {**NO_P2P, "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
# Any NCCL takes one GPU twice if each process says that it is another host.
HOSTS = {**ONE_GPU, "GPU_TEST_HOSTS": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
DIRECT = {"GPU_TEST_LAYOUT": "BLHNC"}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]


def lack(transport: str, environment: dict[str, str]) -> str:
    """Return why the transport cannot be tried here, or ""."""
    if transport != "nccl" or missing_gpu():
        return missing_gpu()
    if is_shim() and environment in (NO_P2P, NET):
        return "the CUDA shim moves all bytes in one way"
    try:
        version = nccl_binding.load().version()
    except KvTransferError as error:
        return str(error)
    if version < ONE_GPU_VERSION and "GPU_TEST_HOSTS" not in environment:
        return f"NCCL {version} refuses two ranks on one GPU: {ONE_GPU_VERSION} is the first"
    return ""


@pytest.mark.parametrize(
    ("role", "transport", "environment"),
    [
        pytest.param("consumer", "nccl", HOSTS, id="two-hosts"),
        pytest.param("consumer", "nccl", HOSTS | DIRECT, id="two-hosts-without-staging"),
        pytest.param("kill", "nccl", HOSTS, id="two-hosts-peer-killed"),
        pytest.param("consumer", "nccl", ONE_GPU, id="peer-to-peer"),
        pytest.param("consumer", "nccl", NO_P2P, id="through-host-memory"),
        pytest.param("consumer", "nccl", NET, id="through-sockets"),
        pytest.param("kill", "nccl", ONE_GPU, id="peer-killed"),
        pytest.param("consumer", "cuda_ipc", {}, id="cuda-ipc"),
        pytest.param("kill", "cuda_ipc", DIRECT, id="cuda-ipc-peer-killed"),
    ],
)
def test_blocks_arrive_exactly(role: str, transport: str, environment: dict[str, str]) -> None:
    if reason := lack(transport, environment):
        pytest.skip(reason)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_transfer", role, transport],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr[-4000:]
