"""The transfer plan: the byte ranges that each consumer rank reads from each producer rank.

The KV cache has groups of layers (cache/geometry.py). Each group is split over ranks by its own
heads. A page holds one block of one layer as [heads, tokens, channels], so a range of heads is one
contiguous byte range in each page.

A consumer rank reads each of its heads once. If several producer ranks hold the same head (fewer KV
heads than ranks, or MLA, whose one latent is on every rank), a hash of the transfer id selects one,
so that the replicas share the load. Both ends compute the same plan.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kv_transfer.cache.geometry import PagePart
from kv_transfer.errors import KvTransferError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.cache.geometry import KvGroup


@dataclass(frozen=True, slots=True)
class GroupRead:
    """The heads of one group to transfer. The producer receives `heads`: first KV head of the
    model, number of heads, and number of heads before them in the consumer's page. `part` is the
    same range in bytes."""

    heads: tuple[int, int, int]
    part: PagePart


@dataclass(frozen=True, slots=True)
class Read:
    """The subscription of a consumer rank at one producer rank. `readers` counts the consumer
    ranks that read from this producer rank."""

    producer_rank: int
    groups: tuple[GroupRead, ...]
    readers: int


@dataclass(frozen=True, slots=True)
class Shard:
    """KV heads of a group that rank `rank` of `tp` tensor-parallel ranks holds. Raises
    UnsupportedLayout.

    `num_kv_heads` counts the heads of the model. MLA has one. A state that is split over the ranks
    counts as one head per rank, so only the same number of ranks can read it. `head_bytes` is the
    size of one head in a page: K and V of a block's tokens.
    """

    num_kv_heads: int
    head_bytes: int
    group: KvGroup
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.group.block_size < 1:
            raise UnsupportedLayout(f"block_size is {self.group.block_size}, must be at least 1")
        for name in ("num_kv_heads", "head_bytes", "tp"):
            if getattr(self, name) < 1:
                raise UnsupportedLayout(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_kv_heads % self.tp and self.tp % self.num_kv_heads:
            raise UnsupportedLayout(
                f"{self.num_kv_heads} KV heads cannot be split over {self.tp} ranks"
            )
        if not 0 <= self.rank < self.tp:
            raise UnsupportedLayout(f"rank {self.rank} of {self.tp} ranks")

    @property
    def heads(self) -> range:
        """Indices of the model's KV heads in each page, split over ranks as vLLM does."""
        first = self.rank * self.num_kv_heads // self.tp
        return range(first, first + max(1, self.num_kv_heads // self.tp))

    @property
    def page_bytes(self) -> int:
        return len(self.heads) * self.head_bytes


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """This rank's part of the KV cache: a shard for each group."""

    shards: tuple[Shard, ...]

    def whole(self, group: int) -> PagePart:
        """Return the part that covers whole pages of a group."""
        return PagePart(group, 0, 0, self.shards[group].page_bytes)

    def part_of(self, group: int, heads: Sequence[int]) -> PagePart:
        """Return the byte range of a subscription's `heads` in this producer rank's pages. Raises
        KvTransferError if this rank does not hold them."""
        if len(heads) != 3 or not heads[1]:
            raise KvTransferError(f"invalid heads in a subscription: {list(heads)}")
        first, count, before = heads
        shard = self.shards[group]
        held = shard.heads
        if not held.start <= first <= first + count <= held.stop:
            raise KvTransferError(
                f"heads {first}-{first + count - 1} are not held here"
                f" (this rank holds {held.start}-{held.stop - 1})"
            )
        size = shard.head_bytes
        return PagePart(group, (first - held.start) * size, before * size, count * size)

    def reads(self, producer_tp: int, transfer_id: str) -> tuple[Read, ...]:
        """Return the reads of this consumer rank from a producer with `producer_tp` ranks."""
        return self._reads(producer_tp, transfer_id)[self.shards[0].rank]

    def declines(self, producer_tp: int, transfer_id: str) -> tuple[int, ...]:
        """Return the producer ranks that no consumer rank reads and that this rank must notify."""
        plan = self._reads(producer_tp, transfer_id)
        read = {each.producer_rank for reads in plan for each in reads}
        return tuple(rank for rank in self.notifies(producer_tp) if rank not in read)

    def notifies(self, producer_tp: int) -> range:
        """Return the producer ranks that this rank notifies on behalf of all consumer ranks."""
        return range(self.shards[0].rank, producer_tp, self.shards[0].tp)

    def _reads(self, producer_tp: int, transfer_id: str) -> tuple[tuple[Read, ...], ...]:
        spread = 0
        if any(producer_tp > shard.num_kv_heads for shard in self.shards):
            # Several producer ranks hold the same head: select one by a hash of the id.
            spread = zlib.crc32(transfer_id.encode("utf-8", "surrogatepass"))
        return _plan(tuple(replace(s, rank=0) for s in self.shards), producer_tp, spread)


@lru_cache(maxsize=64)
def _plan(shards: tuple[Shard, ...], producer_tp: int, spread: int) -> tuple[tuple[Read, ...], ...]:
    """Return the reads of each consumer rank. `spread` selects among producer ranks that hold the
    same heads."""
    found: list[dict[int, list[GroupRead]]] = [{} for _ in range(shards[0].tp)]
    for index, shard in enumerate(shards):
        holders: dict[range, list[int]] = {}
        for rank in range(producer_tp):
            holders.setdefault(replace(shard, tp=producer_tp, rank=rank).heads, []).append(rank)
        size = shard.head_bytes
        for rank, reads in enumerate(found):
            own = replace(shard, rank=rank).heads
            for held, ranks in holders.items():
                both = range(max(own.start, held.start), min(own.stop, held.stop))
                if not both:
                    continue
                before = both.start - own.start
                starts = (both.start - held.start) * size, before * size
                read = GroupRead(
                    (both.start, len(both), before), PagePart(index, *starts, len(both) * size)
                )
                reads.setdefault(ranks[(rank + spread) % len(ranks)], []).append(read)
    readers = Counter(producer for reads in found for producer in reads)
    return tuple(
        tuple(
            Read(producer, tuple(groups), readers[producer]) for producer, groups in reads.items()
        )
        for reads in found
    )
