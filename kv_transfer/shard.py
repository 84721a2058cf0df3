"""One rank's share of its pool's KV, and what it asks of the ranks of another pool.

A page is [heads, tokens, channels], so a range of heads is one run of bytes in each page. A part of
a page is counted here in blocks of this pool's own size; where the other pool's differ, each end
takes of it what is its own page's.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart
from kv_transfer.reshard import PoolLayout, Span, plan_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.layout import KvGeometry

# Tokens are the grant's business; the plan is of heads alone.
_ANY_TOKENS = Span(0, 1)


@dataclass(frozen=True, slots=True)
class Read:
    """What a target rank asks of one source rank. `heads` travels in the Grant: the first of the
    model's KV heads, how many, and how many heads lie before them in the target's page. In all,
    `readers` target ranks read from that source rank."""

    source_rank: int
    heads: tuple[int, int, int]
    part: PagePart
    readers: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor-parallel rank `rank` of `pool`."""

    pool: PoolLayout
    rank: int = 0

    @property
    def heads(self) -> Span:
        """The model's KV heads that lie in each page, in order."""
        return self.pool.heads(self.rank)

    def part_of(self, heads: Sequence[int]) -> PagePart | None:
        """What a Grant's `heads` are in this source rank's pages; None for whole pages. Raises
        KvTransferError where the rank does not hold them."""
        if not heads:
            return None
        if len(heads) != 3 or not heads[1]:
            raise KvTransferError(f"{list(heads)} names no heads")
        first, count, before = heads
        held = self.heads
        if not held.start <= first <= first + count <= held.end:
            raise KvTransferError(
                f"heads {first} to {first + count} were granted, not in {held.start} to {held.end}"
            )
        return self._part(first - held.start, before, count)

    def reads(self, source_tp: int, transfer_id: str) -> tuple[Read, ...]:
        """What this target rank needs of a source of `source_tp` ranks. Raises UnsupportedLayout
        where the heads cannot be dealt out to so many."""
        return _asks(self, source_tp, self._spread(source_tp, transfer_id)).reads

    def declines(self, source_tp: int, transfer_id: str) -> tuple[int, ...]:
        """The source ranks that no target rank reads from, where others hold the same heads, and
        that this target rank has to tell."""
        return _asks(self, source_tp, self._spread(source_tp, transfer_id)).declines

    def told(self, source_tp: int) -> range:
        """The source ranks that hear from this target rank what one rank has to tell for all."""
        return range(self.rank, source_tp, self.pool.tp)

    def _spread(self, source_tp: int, transfer_id: str) -> int:
        # Every target rank must choose alike among source ranks that hold the same heads.
        if source_tp <= self.pool.num_kv_heads:
            return 0  # none do
        return zlib.crc32(transfer_id.encode("utf-8", "surrogatepass"))

    def _part(self, heads_in_source: int, heads_in_target: int, count: int) -> PagePart:
        size = self.pool.block_size * self.pool.head_bytes
        return PagePart(heads_in_source * size, heads_in_target * size, count * size)


class _Asks(NamedTuple):
    reads: tuple[Read, ...]
    declines: tuple[int, ...]


# All transfers between two pools ask alike, where no two source ranks hold the same heads.
@functools.lru_cache(maxsize=64)
def _asks(shard: Shard, source_tp: int, spread: int) -> _Asks:
    source = replace(shard.pool, tp=source_tp)
    pieces = plan_all(source, shard.pool, tokens=_ANY_TOKENS, spread=spread)
    readers = [piece.source_rank for piece in pieces]
    own = shard.heads.start
    reads = [
        Read(
            piece.source_rank,
            (piece.heads.start, len(piece.heads), piece.heads.start - own),
            shard._part(
                piece.heads.start - source.heads(piece.source_rank).start,
                piece.heads.start - own,
                len(piece.heads),
            ),
            readers.count(piece.source_rank),
        )
        for piece in pieces
        if piece.target_rank == shard.rank
    ]
    declines = [rank for rank in shard.told(source_tp) if rank not in readers]
    return _Asks(tuple(reads), tuple(declines))


def whole(geometry: KvGeometry, block_size: int) -> Shard:
    """Of a pool of one rank, whose pages are taken as one head. Raises UnsupportedLayout where a
    page is not so many tokens of equal length."""
    head_bytes, rest = divmod(geometry.page_bytes, block_size)
    if rest:
        raise UnsupportedLayout(f"{block_size} tokens in a page of {geometry.page_bytes} bytes")
    return Shard(PoolLayout(1, (geometry.num_layers,), 1, head_bytes, block_size))
