"""Which worker holds which blocks: chain hash → set of workers, for all models and block sizes.

A chain hash names a block and all before it, and every worker's blocks are closed: with a block it
has all blocks before it (workers see to that, and updates are applied whole). So along a prompt the
set of workers that hold its blocks only shrinks, and where two ends of a stretch have the same set,
so has all between: a lookup need not look at every block.

Entries of a worker that left are at once seen no more, and are taken away in small steps. What is
beyond `max_blocks` is refused, and so is then all that the same worker stores later, else its
blocks would not be closed: its `Holder.truncated` says so, until it is read anew.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from router.prefix.slot_sets import SetsFull, SlotSets
from router.prefix.table import ABSENT, SHARDS, new_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.prefix._table import Table
    from router.prefix.table import DictTable

_MAX_SETS = 1 << 16
# Sets that one step of a clean-up looks at.
_SETS_A_STEP = 1 << 12
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
    """State: the table, the sets, the holders by slot, and what is left to be taken away."""

    def __init__(
        self,
        max_blocks: int,
        *,
        max_sets: int = _MAX_SETS,
        table: Table | DictTable | None = None,
    ) -> None:
        self.max_blocks = max_blocks
        self.refused_blocks = 0
        self._table = new_table() if table is None else table
        self._sets = SlotSets(max_sets, self._table.tell)
        self._names: list[str] = []
        self._names_array = np.empty(64, dtype=object)
        self._named: dict[tuple[int, int], dict[str, int]] = {}
        self._holders: list[Holder | None] = []
        self._free_slots: list[int] = []
        self._left: list[Holder] = []
        self._purge = _Purge([], 0)

    @property
    def blocks(self) -> int:
        """Blocks that are held, or were by workers whose blocks are still being taken away."""
        return len(self._table)

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
            self._remove(holder, _words(removed))
        if stored:
            self._store(holder, _words(stored))

    def _remove(self, holder: Holder, removed: array[int]) -> None:
        sets, run, bit = self._sets, self._table.run, 1 << holder.slot
        start = 0
        while start < len(removed):
            end, held = run(removed, start)
            if held != ABSENT and sets.masks[held] & bit:
                rest = self._without(held, bit)
                changed = self._table.change(removed, start, end, held, rest)
                self._moved(held, rest, changed)
            start = end

    def _without(self, held: int, mask: int) -> int:
        """The set without `mask` and all that left, used once more, or ABSENT."""
        rest = self._sets.masks[held] & self._sets.live & ~mask
        return self._sets.acquire(rest, beyond=True) if rest else ABSENT

    def _moved(self, held: int, new: int, blocks: int) -> None:
        """So many blocks went to the set `new`, which was acquired for one."""
        if new != ABSENT:
            self._sets.reuse(new, blocks - 1)
        self._sets.release(held, blocks)

    def _store(self, holder: Holder, stored: array[int]) -> None:
        if holder.truncated:
            self.refused_blocks += len(stored)
            return
        sets, table, bit = self._sets, self._table, 1 << holder.slot
        start = 0
        while start < len(stored):
            end, held = table.run(stored, start)
            if held == ABSENT:
                end = min(end, start + self.max_blocks - self.blocks)
                if start == end:
                    break
                sets.reuse(holder.alone, table.change(stored, start, end, ABSENT, holder.alone))
            elif not sets.masks[held] & bit:
                try:
                    more = sets.acquire(sets.masks[held] & sets.live | bit)
                except SetsFull:
                    break
                self._moved(held, more, table.change(stored, start, end, held, more))
            start = end
        if start < len(stored):
            holder.truncated = True
            self.refused_blocks += len(stored) - start

    def lengths(self, chain: Sequence[int], unit: int = 1) -> dict[str, int]:
        """How much of the beginning of `chain` each worker holds, in blocks of `unit`; workers
        without any are left out."""
        ends, sets, slots = self._table.runs(_words(chain))
        names, found, gone, after = self._names, dict[str, int](), self.needs_purge, ABSENT
        for blocks, held, slot in zip(reversed(ends), reversed(sets), reversed(slots), strict=True):
            if slot < 0 or gone:
                found = self._with_all(found, held, after, blocks * unit)
            else:
                found[names[slot]] = blocks * unit
            after = held
        return found

    def _with_all(
        self, found: dict[str, int], held: int, after: int, length: int
    ) -> dict[str, int]:
        """What was found, and those of the set `held` that are not in the one after it."""
        masks = self._sets.masks
        holding = masks[held] & self._sets.live
        ending = holding if after == ABSENT else holding & ~masks[after]
        if ending.bit_count() > _FEW:
            # All that hold these, not only those that hold no more: who holds a system prompt is
            # the same from one request to the next.
            named = self._many(holding, length)
            return named | found if found else named.copy()
        while ending:
            slot = ending.bit_length() - 1
            found[self._names[slot]] = length
            ending ^= 1 << slot
        return found

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
        return bool(self._left or self._purge.holders)

    def purge(self) -> None:
        """One step of taking away what left: a look at some of the sets, or at one shard."""
        purge, masks = self._purge, self._sets.masks
        if not purge.holders:
            purge = self._purge = _Purge(self._left, len(masks))
            self._left = []
        done = len(purge.instead)
        if done < purge.sets:
            for held in range(done, min(done + _SETS_A_STEP, purge.sets)):
                purge.instead.append(ABSENT if masks[held] & purge.mask else held)
            return
        for held, blocks in self._table.count(purge.shard, purge.instead).items():
            rest = purge.instead[held] = self._without(held, purge.mask)
            self._moved(held, rest, blocks)
        self._table.replace(purge.shard, purge.instead)
        purge.shard += 1
        if purge.shard == SHARDS:
            for holder in purge.holders:
                self._sets.release(holder.alone)
                self._holders[holder.slot] = None
                self._free_slots.append(holder.slot)
            purge.holders = []


class _Purge:
    """What is taken away. State: how far it has come; by number of a set that had one of these
    workers, of those that there were when it began, another number."""

    def __init__(self, holders: list[Holder], sets: int) -> None:
        self.holders = holders
        self.mask = sum(1 << holder.slot for holder in holders)
        # No set that is made from here on has one of them.
        self.sets = sets
        self.instead = array("I")
        self.shard = 0


def _words(hashes: Sequence[int]) -> array[int]:
    return hashes if isinstance(hashes, array) else array("Q", hashes)
