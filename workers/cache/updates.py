"""Blocks of an engine's prefix cache, as reported to routers that watch it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.model.prefix_hash import pack
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.engine import CacheChange

# Blocks in one frame of a snapshot; a router needs half a millisecond to read them.
_SNAPSHOT_PART = 1 << 12


class CachedBlocks:
    """State: the chain hashes of blocks in the engine's memory, each after its parent, and of
    blocks in host memory."""

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}
        self.tier_blocks: set[int] = set()

    def apply(self, change: CacheChange) -> None:
        for block in change.removed:
            self.blocks.pop(block, None)
        self.blocks.update(dict.fromkeys(change.stored))
        self.tier_blocks.difference_update(change.tier_removed)
        self.tier_blocks.update(change.tier_stored)

    def snapshot(self) -> Iterator[w.CacheUpdate]:
        """Yield all blocks in parts, because a single message would block the router's loop."""
        blocks, in_tiers = list(self.blocks), list(self.tier_blocks)
        count = max(1, len(blocks), len(in_tiers))
        for start in range(0, count, _SNAPSHOT_PART):
            end = start + _SNAPSHOT_PART
            yield w.CacheUpdate(
                reset=not start,
                more=end < count,
                stored=pack(blocks[start:end]),
                tier_stored=pack(in_tiers[start:end]),
            )


def change_to_pb(change: CacheChange) -> w.CacheUpdate:
    return w.CacheUpdate(
        removed=pack(change.removed),
        stored=pack(change.stored),
        tier_removed=pack(change.tier_removed),
        tier_stored=pack(change.tier_stored),
    )
