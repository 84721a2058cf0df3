"""tests/gpu/gpu_transfer.py without a GPU: the same script over devices in host memory, and torch's
kernels. Run by test_gpu_scripts.py."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

import torch

from kv_transfer import gather as kernels
from kv_transfer import transport
from kv_transfer.device.staging import StagingLimits
from kv_transfer.nccl.pool import PoolLimits
from kv_transfer.transport.cuda_ipc import CudaIpcTransport, IpcLimits
from kv_transfer.transport.nccl import NcclLimits, NcclTransport
from tests.gpu import gpu_transfer
from tests.unit.kv_transfer.fake_device import TIMEOUTS, FakeSharingDevice
from tests.unit.kv_transfer.fake_nccl import Fabric, FakeEvent, FakeNccl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.device.region import DeviceRegion
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import Transport

FABRIC = Fabric()


class TorchMover:
    """What a GPU's kernels do, by torch."""

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region

    def gather(self, block_ids: Sequence[int], address: int) -> FakeEvent:
        return self._move(kernels.gather, block_ids, address)

    def scatter(self, block_ids: Sequence[int], address: int) -> FakeEvent:
        return self._move(kernels.scatter, block_ids, address)

    def _move(self, how: object, block_ids: Sequence[int], address: int) -> FakeEvent:
        size = len(block_ids) * self._region.geometry.block_bytes
        memory = (ctypes.c_ubyte * size).from_address(address)
        staging = torch.frombuffer(memory, dtype=torch.uint8)
        how(self._region.cache, *self._region.piece(block_ids), staging)  # type: ignore[operator]
        return FakeEvent()


class Device(FakeSharingDevice):
    def mover(self, region: DeviceRegion) -> TorchMover:  # type: ignore[override]
        return TorchMover(region)


def make(settings: KvSettings) -> list[Transport]:
    staging, nccl = StagingLimits(4, settings.staging_slot_bytes), FakeNccl(FABRIC)
    if settings.transports == ("cuda_ipc",):
        return [CudaIpcTransport(Device(nccl), IpcLimits(staging))]
    return [NcclTransport(nccl, Device(nccl), NcclLimits(PoolLimits(timeouts=TIMEOUTS), staging))]


if __name__ == "__main__":
    transport.make = make  # type: ignore[assignment]
    torch.Tensor.cuda = torch.Tensor.clone  # type: ignore[assignment, method-assign]
    gpu_transfer.SELF = ["-m", "tests.unit.kv_transfer.gpu_dry_run"]
    gpu_transfer.main(*sys.argv[1:])
