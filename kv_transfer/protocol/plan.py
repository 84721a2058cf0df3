"""Which bytes of a KV page go from which producer rank to which consumer rank.

A page holds one block of one layer as [heads, tokens, channels], so a range of heads is one run of
bytes in each page. A consumer rank reads each of its heads once. Where several producer ranks hold
the same head (fewer KV heads than ranks, or the one latent of MLA on every rank), the transfer id
chooses one, so that replicas share the work. Both ends compute the same plan.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Read:
    """What a consumer rank subscribes to at one producer rank.

    `heads` is sent to the producer: first KV head of the model, number of heads, and number of
    heads before them in the consumer's page. `part` is the same in bytes. `readers` counts the
    consumer ranks that read from this producer rank.
    """

    producer_rank: int
    heads: tuple[int, int, int]
    part: PagePart
    readers: int


@dataclass(frozen=True, slots=True)
class Shard:
    """KV heads that rank `rank` of `tp` tensor-parallel ranks holds. Raises UnsupportedLayout.

    `num_kv_heads` counts the heads of the model; MLA has one. `head_bytes` is the size of one head
    in a page: K and V of a block's tokens.
    """

    num_kv_heads: int
    head_bytes: int
    block_size: int
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_bytes", "block_size", "tp"):
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
        """The model's KV heads in each page, as vLLM splits them over ranks."""
        first = self.rank * self.num_kv_heads // self.tp
        return range(first, first + max(1, self.num_kv_heads // self.tp))

    def part_of(self, heads: Sequence[int]) -> PagePart | None:
        """Return the bytes that a subscription's `heads` are in this producer rank's pages.

        None means whole pages. Raises KvTransferError if this rank does not hold the heads.
        """
        if not heads:
            return None
        if len(heads) != 3 or not heads[1]:
            raise KvTransferError(f"invalid heads in a subscription: {list(heads)}")
        first, count, before = heads
        held = self.heads
        if not held.start <= first <= first + count <= held.stop:
            raise KvTransferError(
                f"heads {first}-{first + count - 1} are not held here"
                f" (this rank holds {held.start}-{held.stop - 1})"
            )
        size = self.head_bytes
        return PagePart((first - held.start) * size, before * size, count * size)

    def reads(self, producer_tp: int, transfer_id: str) -> tuple[Read, ...]:
        """Return what this consumer rank reads of a producer with `producer_tp` ranks."""
        plan = _plan(replace(self, rank=0), producer_tp, self._spread(producer_tp, transfer_id))
        return plan[self.rank]

    def declines(self, producer_tp: int, transfer_id: str) -> tuple[int, ...]:
        """Return the producer ranks that no consumer rank reads and that this rank has to tell."""
        plan = _plan(replace(self, rank=0), producer_tp, self._spread(producer_tp, transfer_id))
        read = {each.producer_rank for reads in plan for each in reads}
        return tuple(rank for rank in self.told(producer_tp) if rank not in read)

    def told(self, producer_tp: int) -> range:
        """Return the producer ranks to which this rank speaks for all consumer ranks."""
        return range(self.rank, producer_tp, self.tp)

    def _spread(self, producer_tp: int, transfer_id: str) -> int:
        if producer_tp <= self.num_kv_heads:
            return 0  # no two producer ranks hold the same head
        return zlib.crc32(transfer_id.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=64)
def _plan(consumer: Shard, producer_tp: int, spread: int) -> tuple[tuple[Read, ...], ...]:
    """Return the reads of each consumer rank. `spread` chooses among producer ranks that hold the
    same heads."""
    holders: dict[range, list[int]] = {}
    for rank in range(producer_tp):
        holders.setdefault(replace(consumer, tp=producer_tp, rank=rank).heads, []).append(rank)
    pieces: list[tuple[int, int, range, range]] = []
    for rank in range(consumer.tp):
        own = replace(consumer, rank=rank).heads
        for held, ranks in holders.items():
            both = range(max(own.start, held.start), min(own.stop, held.stop))
            if both:
                pieces.append((rank, ranks[(rank + spread) % len(ranks)], both, held))
    readers = [producer for _, producer, _, _ in pieces]
    size = consumer.head_bytes
    plan: list[list[Read]] = [[] for _ in range(consumer.tp)]
    for rank, producer, both, held in pieces:
        before = both.start - replace(consumer, rank=rank).heads.start
        part = PagePart((both.start - held.start) * size, before * size, len(both) * size)
        heads = (both.start, len(both), before)
        plan[rank].append(Read(producer, heads, part, readers.count(producer)))
    return tuple(tuple(reads) for reads in plan)
