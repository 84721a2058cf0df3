"""tests/gpu/gpu_transfer.py without a GPU: the same script over devices in host memory, and torch's
kernels. Run by test_gpu_scripts.py."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from kv_transfer import transport
from kv_transfer.device.staging import StagingLimits
from kv_transfer.nccl.pool import PoolLimits
from kv_transfer.transport.cuda_ipc import CudaIpcTransport, IpcLimits
from kv_transfer.transport.nccl import NcclLimits, NcclTransport
from tests.gpu import gpu_transfer
from tests.unit.kv_transfer.fake_device import TIMEOUTS, FakeSharingDevice
from tests.unit.kv_transfer.fake_nccl import Fabric, FakeNccl

if TYPE_CHECKING:
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import Transport

FABRIC = Fabric()


def make(settings: KvSettings) -> list[Transport]:
    staging, nccl = StagingLimits(4, settings.staging_slot_bytes), FakeNccl(FABRIC)
    device = FakeSharingDevice(nccl)
    if settings.transports == ("cuda_ipc",):
        return [CudaIpcTransport(device, IpcLimits(staging))]
    return [NcclTransport(nccl, device, NcclLimits(PoolLimits(timeouts=TIMEOUTS), staging))]


if __name__ == "__main__":
    transport.make = make  # type: ignore[assignment]
    torch.Tensor.cuda = torch.Tensor.clone  # type: ignore[assignment, method-assign]
    gpu_transfer.SELF = ["-m", "tests.unit.kv_transfer.gpu_dry_run"]
    gpu_transfer.main(*sys.argv[1:])
