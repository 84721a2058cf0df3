"""What a GPU's kernels do, by torch, over GPU layouts in host memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from kv_transfer import gather as kernels
from kv_transfer.device.region import DeviceRegion, device_region
from kv_transfer.transport.base import LocalKv
from tests.unit.kv_transfer.fake_nccl import FakeEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.reshard import Span


class TorchMover:
    """Copies at once."""

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region

    def gather(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> FakeEvent:
        return self._move(kernels.gather, block_ids, tokens, address)

    def scatter(self, block_ids: Sequence[int], tokens: Span | None, address: int) -> FakeEvent:
        return self._move(kernels.scatter, block_ids, tokens, address)

    def _move(
        self, how: object, block_ids: Sequence[int], tokens: Span | None, address: int
    ) -> FakeEvent:
        piece, table = self._region.piece(block_ids, tokens)
        memory = (ctypes.c_ubyte * self._region.cache.size_bytes(piece)).from_address(address)
        staging = torch.frombuffer(memory, dtype=torch.uint8)
        how(self._region.cache, piece, table, staging)  # type: ignore[operator]
        return FakeEvent()


class DeviceCache:
    """A cache of [layers, blocks, heads, tokens, content] bytes, where `layout` says which of heads
    and tokens lie closer: HND or NHD. Full of poison."""

    def __init__(
        self, layout: str, shape: tuple[int, int, int, int, int], poison: int = 0x5A
    ) -> None:
        layers, blocks, heads, tokens, content = shape
        order = (layers, blocks, tokens, heads, content) if layout == "NHD" else shape
        memory = torch.full(order, poison, dtype=torch.uint8)
        self.cells = memory.transpose(2, 3) if layout == "NHD" else memory
        self.region = device_region(list(self.cells), blocks)
        self.local = LocalKv(self.region, None)

    def close(self) -> None:
        """It is Python's."""
