"""A transport whose target finds bits flipped in what has just been put in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion
    from kv_transfer.messages import Chunk
    from kv_transfer.transport.base import (
        LocalKv,
        SourceChannel,
        TargetChannel,
        Transport,
        Wire,
    )


def flip(region: KvRegion, block: int, bit: int) -> None:
    """Flips one bit of the block, counted over its layers."""
    g = region.geometry
    layer, byte = divmod(bit // 8 % g.block_bytes, g.page_bytes)
    cell = ctypes.c_uint8.from_address(region.address + g.page_offset(layer, block) + byte)
    cell.value ^= 1 << bit % 8


@dataclass(slots=True)
class Flips:
    """How many of the next chunks come damaged, and where; `seen` counts all chunks in place."""

    left: int = 0
    bit: int = 0
    seen: int = 0

    def strike(self, region: KvRegion, block_ids: list[int]) -> None:
        """Damages the last block of a chunk, if it is the turn."""
        self.seen += 1
        if self.left:
            self.left -= 1
            flip(region, block_ids[-1], self.bit)


class FlippingTransport:
    """`inner`, and `flips` at the receiving end."""

    def __init__(self, inner: Transport, flips: Flips) -> None:
        self.name = inner.name
        self._inner = inner
        self._flips = flips

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        return self._inner.offer(local, slot)

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        channel = self._inner.target(local, slot, wire)
        return _FlippingTarget(
            channel, lambda block_ids: self._flips.strike(local.region, block_ids)
        )

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        return self._inner.source(local, offer, wire)


class _FlippingTarget:
    def __init__(self, inner: TargetChannel, strike: Callable[[list[int]], None]) -> None:
        self.name = inner.name
        self._inner = inner
        self._strike = strike

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        self._inner.receive(chunk, block_ids, part)
        if block_ids is not None:
            self._strike(block_ids)

    def idle(self) -> bool:
        return self._inner.idle()

    def close(self) -> None:
        self._inner.close()
