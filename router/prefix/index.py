"""Which worker holds which blocks: chain hash → set of workers, for all models and block sizes.

A chain hash names a block and all before it, and every worker's blocks are closed: with a block it
has all blocks before it (workers see to that, and updates are applied whole). So along a prompt the
set of workers that hold its blocks only shrinks, and where two ends of a stretch have the same set,
so has all between: a lookup halves stretches and needs few probes, whatever the prompt's length.

Entries of a worker that left are at once seen no more, and are taken away in small steps. What is
beyond `max_blocks` is refused, and so is then all that the same worker stores later, else its
blocks would not be closed: its `Holder.truncated` says so, until it is read anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from router.prefix.slot_sets import SetsFull, SlotSets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# One table per shard: growing one of 10,000 entries takes a ms, one of 10 million a second.
_SHARDS = 1 << 10
_SHARD = _SHARDS - 1
_MAX_SETS = 1 << 16
# Up to so many workers are named one by one.
_FEW = 4
_MAX_NAMED = 64


@dataclass(slots=True, eq=False)
class Holder:
    """One worker's place in the index, from one snapshot to the next. `truncated` where blocks of
    it were refused, so that it may hold more than the index says."""

    worker_id: str
    slot: int
    alone: int
    truncated: bool = False


class PrefixIndex:
    """State: the shards, the sets, the holders by slot, and what is left to be taken away."""

    def __init__(self, max_blocks: int, *, max_sets: int = _MAX_SETS) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.refused_blocks = 0
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._sets = SlotSets(max_sets)
        self._names: list[str] = []
        self._names_array = np.empty(64, dtype=object)
        self._named: dict[tuple[int, int], dict[str, int]] = {}
        self._holders: list[Holder | None] = []
        self._free_slots: list[int] = []
        self._left: list[Holder] = []
        self._purging: list[Holder] = []
        self._purge_mask = 0
        self._purge_sets: set[int] = set()
        self._purge_cursor = 0

    @property
    def distinct_sets(self) -> int:
        """Sets of workers that are told apart."""
        return len(self._sets)

    @property
    def truncated_workers(self) -> int:
        """Workers some of whose blocks were refused."""
        live = self._sets.live
        return sum(1 for h in self._holders if h and h.truncated and live >> h.slot & 1)

    @property
    def has_room(self) -> bool:
        """Whether it is worth reading a truncated worker anew."""
        return self.blocks < 0.9 * self.max_blocks

    def join(self, worker_id: str) -> Holder:
        """A place for a worker, without blocks yet."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._holders)
            self._holders.append(None)
            self._names.append(worker_id)
            if slot >= len(self._names_array):
                spare = np.empty_like(self._names_array)
                self._names_array = np.concatenate((self._names_array, spare))
        holder = Holder(worker_id, slot, self._sets.acquire(1 << slot, beyond=True))
        self._holders[slot] = holder
        self._named.clear()
        self._names[slot] = self._names_array[slot] = worker_id
        self._sets.live |= 1 << slot
        return holder

    def leave(self, holder: Holder) -> None:
        """The worker's blocks count no more; `purge` takes them away. Once for each `join`."""
        self._sets.live &= ~(1 << holder.slot)
        self._left.append(holder)

    def apply(self, holder: Holder, removed: Sequence[int], stored: Sequence[int]) -> None:
        """What changed at a worker. Unknown removals and repeated stores change nothing."""
        if removed:
            self._remove(holder, removed)
        if stored:
            self._store(holder, stored)

    def _remove(self, holder: Holder, removed: Sequence[int]) -> None:
        sets, shards, alone = self._sets, self._shards, holder.alone
        bit, gone = 1 << holder.slot, 0
        for chain_hash in removed:
            shard = shards[chain_hash & _SHARD]
            held = shard.get(chain_hash)
            if held == alone:
                del shard[chain_hash]
                gone += 1
            elif held is not None and sets.masks[held] & bit:
                self._withdraw(shard, chain_hash, held, bit)
        if gone:
            self.blocks -= gone
            sets.release(alone, gone)

    def _withdraw(self, shard: dict[int, int], chain_hash: int, held: int, mask: int) -> None:
        """Take `mask`, and all that left, from the workers that hold a block."""
        sets = self._sets
        rest = sets.masks[held] & sets.live & ~mask
        if rest:
            shard[chain_hash] = sets.acquire(rest, beyond=True)
        else:
            del shard[chain_hash]
            self.blocks -= 1
        sets.release(held)

    def _store(self, holder: Holder, stored: Sequence[int]) -> None:
        if holder.truncated:
            self.refused_blocks += len(stored)
            return
        sets, shards, alone = self._sets, self._shards, holder.alone
        masks, live, bit = sets.masks, sets.live, 1 << holder.slot
        room = self.max_blocks - self.blocks
        new = done = 0
        for chain_hash in stored:
            shard = shards[chain_hash & _SHARD]
            held = shard.get(chain_hash)
            if held is None:
                if new == room:
                    break
                shard[chain_hash] = alone
                new += 1
            elif not masks[held] & bit:
                try:
                    shard[chain_hash] = sets.acquire(masks[held] & live | bit)
                except SetsFull:
                    break
                sets.release(held)
            done += 1
        self.blocks += new
        sets.reuse(alone, new)
        if done < len(stored):
            holder.truncated = True
            self.refused_blocks += len(stored) - done

    def match(self, chain: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where along `chain` fewer workers go on: (blocks up to there, mask of those that hold
        these and no more, mask of all that hold these), in the order of the prompt."""
        if not chain:
            return []
        shards, live, masks = self._shards, self._sets.live, self._sets.masks
        first = shards[chain[0] & _SHARD].get(chain[0])
        if first is None:
            return []
        found: list[tuple[int, int, int]] = []
        low, low_set = 0, first
        # Right ends of stretches whose left end is `low`, the nearest last. -1 is no worker.
        ends = [(len(chain), -1)]
        while ends:
            high, high_set = ends[-1]
            if low_set == high_set:
                low = high
                ends.pop()
            elif high - low > 1:
                middle = (low + high) // 2
                chain_hash = chain[middle]
                held = shards[chain_hash & _SHARD].get(chain_hash, -1)
                ends.append((middle, held))
            else:
                holding = ending = masks[low_set] & live
                if high_set >= 0:
                    ending &= ~masks[high_set]
                if ending:
                    found.append((high, ending, holding))
                if high_set < 0:
                    break
                low, low_set = high, high_set
                ends.pop()
        return found

    def lengths(self, chain: Sequence[int], unit: int = 1) -> dict[str, int]:
        """How much of the beginning of `chain` each worker holds, in blocks of `unit`; workers
        without any are left out."""
        found: dict[str, int] = {}
        for blocks, ending, holding in self.match(chain):
            if ending.bit_count() <= _FEW:
                for name in self._few(ending):
                    found[name] = blocks * unit
            else:
                # Those that hold more are overwritten by what follows. Who holds a system prompt is
                # the same from one request to the next, who holds no more than it is not.
                named = self._many(holding, blocks * unit)
                found = found | named if found else named.copy()
        return found

    def _few(self, mask: int) -> Iterator[str]:
        while mask:
            slot = mask.bit_length() - 1
            yield self._names[slot]
            mask ^= 1 << slot

    def _many(self, mask: int, length: int) -> dict[str, int]:
        known = self._named.get((mask, length))
        if known is None:
            if len(self._named) >= _MAX_NAMED:
                self._named.clear()
            size = (mask.bit_length() + 7) // 8
            bits = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
            slots = np.unpackbits(bits, bitorder="little").nonzero()[0]
            known = dict.fromkeys(self._names_array[slots].tolist(), length)
            self._named[mask, length] = known
        return known

    @property
    def needs_purge(self) -> bool:
        """Whether blocks of workers that left are still there."""
        return bool(self._left or self._purging)

    def purge(self) -> None:
        """One step of taking away what left: a look at one shard."""
        if not self._purging:
            self._purging, self._left = self._left, []
            self._purge_mask = sum(1 << holder.slot for holder in self._purging)
            self._purge_cursor = 0
            # No set that is made from here on has one of them.
            self._purge_sets = {
                set_id for set_id, x in enumerate(self._sets.masks) if x & self._purge_mask
            }
        affected, shard = self._purge_sets, self._shards[self._purge_cursor]
        for chain_hash in [x for x, held in shard.items() if held in affected]:
            self._withdraw(shard, chain_hash, shard[chain_hash], self._purge_mask)
        self._purge_cursor += 1
        if self._purge_cursor == _SHARDS:
            for holder in self._purging:
                self._sets.release(holder.alone)
                self._holders[holder.slot] = None
                self._free_slots.append(holder.slot)
            self._purging = []
