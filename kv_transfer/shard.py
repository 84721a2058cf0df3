"""One rank's share of its pool's KV, and what it asks of the ranks of another pool.

On CPU a page is [heads, tokens, channels], so a range of heads is one run of bytes in each page.
The two pools have one block size and one packing of a head's bytes (kv_transfer/layout.py): what
differs is which heads a rank's pages hold.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart
from kv_transfer.reshard import Piece, PoolLayout, Span, plan_all

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
        source = replace(self.pool, tp=source_tp)
        pieces = self._pieces(source, transfer_id)
        readers = [piece.source_rank for piece in pieces]
        return tuple(
            Read(
                piece.source_rank,
                (piece.heads.start, len(piece.heads), piece.heads.start - self.heads.start),
                self._part(
                    piece.heads.start - source.heads(piece.source_rank).start,
                    piece.heads.start - self.heads.start,
                    len(piece.heads),
                ),
                readers.count(piece.source_rank),
            )
            for piece in pieces
            if piece.target_rank == self.rank
        )

    def declines(self, source_tp: int, transfer_id: str) -> tuple[int, ...]:
        """The source ranks that no target rank reads from, where others hold the same heads, and
        that this target rank has to tell."""
        read = {p.source_rank for p in self._pieces(replace(self.pool, tp=source_tp), transfer_id)}
        return tuple(rank for rank in self.told(source_tp) if rank not in read)

    def told(self, source_tp: int) -> range:
        """The source ranks that hear from this target rank what one rank has to tell for all."""
        return range(self.rank, source_tp, self.pool.tp)

    def _pieces(self, source: PoolLayout, transfer_id: str) -> tuple[Piece, ...]:
        # Every target rank must choose alike among source ranks that hold the same heads.
        spread = zlib.crc32(transfer_id.encode("utf-8", "surrogatepass"))
        return plan_all(source, self.pool, tokens=_ANY_TOKENS, spread=spread)

    def _part(self, heads_in_source: int, heads_in_target: int, count: int) -> PagePart:
        size = self.pool.block_size * self.pool.head_bytes
        return PagePart(heads_in_source * size, heads_in_target * size, count * size)


def whole(geometry: KvGeometry, block_size: int) -> Shard:
    """Of a pool of one rank, whose pages are taken as one head. Raises UnsupportedLayout where a
    page is not so many tokens of equal length."""
    head_bytes, rest = divmod(geometry.page_bytes, block_size)
    if rest:
        raise UnsupportedLayout(f"{block_size} tokens in a page of {geometry.page_bytes} bytes")
    return Shard(PoolLayout(1, (geometry.num_layers,), 1, head_bytes, block_size))
