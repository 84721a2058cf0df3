"""What moves of a chunk through staging slots, in the smallest parts that a slot may hold: blocks,
or tokens where the two ends' blocks differ in size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.reshard import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.device.base import Event, Mover
    from kv_transfer.memory import KvRegion
    from kv_transfer.messages import Chunk


@dataclass(frozen=True, slots=True)
class Units:
    """`count` of them, `size_bytes` each: the blocks of `block_ids`, or, with `first`, tokens from
    that one on, counted from the first block's first."""

    block_ids: Sequence[int]
    count: int
    size_bytes: int
    first: int | None = None

    def gather(self, mover: Mover, run: slice, address: int) -> Event:
        """A run of them → staging."""
        return mover.gather(*self._of(run), address)

    def scatter(self, mover: Mover, run: slice, address: int) -> Event:
        """Staging → a run of them."""
        return mover.scatter(*self._of(run), address)

    def _of(self, run: slice) -> tuple[Sequence[int], Span | None]:
        if self.first is None:
            return self.block_ids[run], None
        return self.block_ids, Span(self.first + run.start, self.first + run.stop)


def units_of(
    region: KvRegion, chunk: Chunk, block_ids: Sequence[int] | None, skip: int = 0
) -> Units:
    """Of a chunk that goes from, or to, these blocks; None is nowhere. Raises KvTransferError where
    tokens are to move and the region knows none."""
    count = chunk.tokens or chunk.count
    if block_ids is None:  # what is thrown away may be some heads, of which this end knows nothing
        return Units((), count, max(1, chunk.bytes // max(1, count)))
    size_bytes = region.size_bytes(1, min(1, chunk.tokens))
    return Units(block_ids, count, size_bytes, skip if chunk.tokens else None)
