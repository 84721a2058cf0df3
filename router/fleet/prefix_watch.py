"""Prefix cache index: the KV blocks that each worker has cached, updated by events of the workers.

Blocks are named by chain hashes (pdserve/model/prefix_hash.py). A hash stands for a block and all
blocks before it, for one model and one block size.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from pdserve.model import prefix_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pdserve.v1 import worker_pb2 as w
    from router.fleet.member import Member
    from router.placement.values import Demand

# More parts would be slower: the blocks of a prompt lie side by side in each.
_PARTS = 1 << 7
_PART = _PARTS - 1  # the bits of a hash that select its part
_PURGE_BLOCKS = 1 << 14  # blocks checked per purge step: about 2 ms


class Holder(NamedTuple):
    """A worker in the index, from one snapshot of its cache until the next. Its `bit` in the masks
    is not reused before its blocks are purged."""

    worker_id: str
    bit: int


class _Masks:
    """Bit masks of workers by block hash, in parts, because a growing dictionary copies itself:
    with 10 million blocks that would block the event loop for a second."""

    def __init__(self) -> None:
        self.parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self.size = 0

    def get(self, block: int) -> int:
        return self.parts[block & _PART].get(block, 0)

    def remove(self, blocks: Iterable[int], bit: int, live: int) -> None:
        """Remove a worker from the masks of some blocks."""
        for block in blocks:
            part = self.parts[block & _PART]
            mask = part.get(block, 0)
            if mask & bit:
                # Also clear bits of departed workers, which leaves less to purge.
                if mask := mask & live & ~bit:
                    part[block] = mask
                else:
                    del part[block]
                    self.size -= 1

    def store(self, blocks: Iterable[int], bit: int, most: int) -> None:
        """Add a worker to the masks of some blocks. Ignore new blocks beyond `most`."""
        # Blocks of one prompt mostly have the same workers, so they share one mask, which has up to
        # 160 bytes for 1,000 workers.
        before, after = 0, bit
        for block in blocks:
            part = self.parts[block & _PART]
            mask = part.get(block, 0)
            if mask is not before:
                before, after = mask, mask | bit if mask else bit
            if mask:
                part[block] = after
            elif self.size < most:
                part[block] = after
                self.size += 1

    def purge(self, departed: int) -> Iterator[None]:
        """Remove workers from all masks. Yields after each step."""
        checked = 0
        for part in self.parts:
            # A copy, because updates change the part between two steps.
            for block in list(part):
                mask = part.get(block, 0)
                if mask & departed:
                    if mask := mask & ~departed:
                        part[block] = mask
                    else:
                        del part[block]
                        self.size -= 1
                checked += 1
                if checked % _PURGE_BLOCKS == 0:
                    yield


class PrefixIndex:
    """Maps a block hash to two bit masks: workers that have the block cached, and workers that have
    it in host memory.

    A full index accepts no further blocks. Workers then have more cached than the router knows, and
    a request may only be placed on a worker that computes its prompt again.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._masks = _Masks()
        self._tier_masks = _Masks()
        self._live: dict[int, Holder] = {}  # by bit
        self._live_mask = 0
        self._departed_mask = 0  # departed workers whose blocks are not purged yet
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        return self._masks.size

    def join(self, worker_id: str) -> Holder:
        """Add a worker that has no blocks yet."""
        if not self._free_bits:
            used = self._live_mask | self._departed_mask
            self._free_bits.append(1 << used.bit_length())
        holder = Holder(worker_id, self._free_bits.pop())
        self._live[holder.bit] = holder
        self._live_mask |= holder.bit
        return holder

    def leave(self, holder: Holder) -> None:
        """Remove a worker. Look-ups ignore its blocks from now on, and `purge` frees them later:
        to visit all blocks here would block the event loop."""
        del self._live[holder.bit]
        self._live_mask &= ~holder.bit
        self._departed_mask |= holder.bit

    def apply(
        self,
        holder: Holder,
        removed: Iterable[int],
        stored: Iterable[int],
        *,
        in_tiers: bool = False,
    ) -> None:
        """Apply one update of a cache, or of host memory. Unknown removals and repeated stores are
        ignored."""
        masks = self._tier_masks if in_tiers else self._masks
        masks.remove(removed, holder.bit, self._live_mask)
        masks.store(stored, holder.bit, self.max_blocks)

    def cached_blocks(self, chain: Sequence[int]) -> dict[str, int]:
        """Return the number of leading blocks of `chain` that each worker has cached, if any."""
        parts = self._masks.parts
        return self._leading(chain, lambda x: parts[x & _PART].get(x, 0))

    def blocks_with_tiers(self, chain: Sequence[int]) -> dict[str, int]:
        """Return the number of leading blocks of `chain` that each worker has cached or in host
        memory. Empty if no worker has a block in host memory."""
        masks, tiers = self._masks, self._tier_masks
        return self._leading(chain, lambda x: masks.get(x) | tiers.get(x)) if tiers.size else {}

    def _leading(self, chain: Sequence[int], mask: Callable[[int], int]) -> dict[str, int]:
        found: dict[str, int] = {}
        # One mask operation per block serves all workers, and stops at the first block that no
        # worker has.
        holders, depth = self._live_mask, 0
        for block in chain:
            remaining = mask(block) & holders
            if remaining != holders:
                if depth:
                    self._record(found, holders ^ remaining, depth)
                holders = remaining
                if not holders:
                    break
            depth += 1
        if depth:
            self._record(found, holders, depth)
        return found

    def _record(self, found: dict[str, int], holders: int, depth: int) -> None:
        while holders:
            bit = 1 << (holders.bit_length() - 1)
            found[self._live[bit].worker_id] = depth
            holders ^= bit

    @property
    def needs_purge(self) -> bool:
        return bool(self._departed_mask)

    def purge(self) -> Iterator[None]:
        """Free the blocks of workers that left. Yields after each step, so that the event loop can
        run in between."""
        departed = self._departed_mask
        for masks in (self._masks, self._tier_masks):
            yield from masks.purge(departed)
        # No mask has these bits, so new workers may use them.
        self._departed_mask &= ~departed
        while departed:
            bit = 1 << (departed.bit_length() - 1)
            self._free_bits.append(bit)
            departed ^= bit


class PrefixWatcher:
    """Applies the updates of workers to the index. A worker's blocks are in the index from its
    snapshot until its connection ends."""

    def __init__(self, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self._holders: dict[Member, Holder] = {}
        self._block_sizes: Counter[tuple[str, int]] = Counter()  # by model
        self._purger: asyncio.Task[None] | None = None

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """Return the number of prompt tokens in the cache of each worker, by worker id."""
        return self._tokens(demand, self.index.cached_blocks)

    def tokens_with_tiers(self, demand: Demand) -> Mapping[str, int]:
        """Return the number of prompt tokens in the cache or the host memory of each worker, by
        worker id. Empty if host memory has none."""
        return self._tokens(demand, self.index.blocks_with_tiers)

    def _tokens(
        self, demand: Demand, leading: Callable[[Sequence[int]], dict[str, int]]
    ) -> Mapping[str, int]:
        found: dict[str, int] = {}
        # Workers of one model may have different block sizes, and so different hashes.
        for model, block_size in self._block_sizes:
            if model == demand.model:
                blocks = leading(demand.block_hashes(block_size))
                found |= {worker: count * block_size for worker, count in blocks.items()}
        return found

    def apply(self, member: Member, update: w.CacheUpdate) -> None:
        """Apply an update of a worker. Raises ValueError if it is malformed."""
        packed = (update.removed, update.stored, update.tier_removed, update.tier_stored)
        removed, stored, tier_removed, tier_stored = map(prefix_hash.unpack, packed)
        if update.reset:
            self.forget(member)
            self._holders[member] = self.index.join(member.worker_id)
            self._block_sizes[member.info.model.name, member.info.block_size] += 1
        holder = self._holders.get(member)
        if holder is None:
            raise ValueError("a change of the cache came before its snapshot")
        self.index.apply(holder, removed, stored)
        self.index.apply(holder, tier_removed, tier_stored, in_tiers=True)

    def forget(self, member: Member) -> None:
        """Drop the blocks of a worker, if the index has any."""
        holder = self._holders.pop(member, None)
        if holder is None:
            return
        key = member.info.model.name, member.info.block_size
        self._block_sizes[key] -= 1
        if not self._block_sizes[key]:
            del self._block_sizes[key]
        self.index.leave(holder)
        if self._purger is None or self._purger.done():
            self._purger = asyncio.create_task(self._purge(), name="prefix-purge")

    async def _purge(self) -> None:
        while self.index.needs_purge:
            for _ in self.index.purge():
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Cancel the purge task and wait for its end."""
        if self._purger is not None:
            self._purger.cancel()
            await asyncio.wait([self._purger])
