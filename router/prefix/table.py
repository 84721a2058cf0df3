"""The table of the prefix index: which set of workers, by number, has the block of a chain hash.

In C (_table.c), where 10 million blocks are 150 MB, or where that was not built in dicts, to the
same answers. Hashes are arrays of 64-bit words ("Q"), sets numbers of 32 bits, of which `ABSENT`
says that a block has none.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from router.prefix._table import Table

try:
    from router.prefix import _table as compiled
except ImportError:  # installed where there was no C compiler
    compiled = None  # type: ignore[assignment]

ABSENT = (1 << 32) - 1
# One call looks at, grows or cleans one of them, so that none takes a second.
SHARDS = 1 << 10
# See _table.c.
_STRIDES = (64, 8, 1)
_MAX_RUN = 1024


def new_table() -> Table | DictTable:
    """An empty one, the quickest that there is."""
    # Who knows the secret can make a table slow, by hashes that have one place.
    return DictTable() if compiled is None else compiled.Table(secrets.randbits(64))


class DictTable:
    """Both tables have these methods. Numbers of sets are the caller's to give."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._used = 0

    def __len__(self) -> int:
        """Blocks that have a set."""
        return self._used

    def _get(self, chain_hash: int) -> int:
        return self._shards[chain_hash % SHARDS].get(chain_hash, ABSENT)

    def runs(self, hashes: array[int]) -> tuple[list[int], list[int], list[int]]:
        """Where along a prompt the set becomes another, up to the first block that has none: the
        places behind the last blocks, the sets up to there, and the one worker's slot that is in
        these and not in the next; or -1 where that are none or more, or it was not looked up. Takes
        it that blocks between two of one set have it too, or sets whose difference does not matter,
        and looks at few of them."""
        ends: list[int] = []
        sets: list[int] = []
        end = 0
        while end < len(hashes) and (held := self._get(hashes[end])) != ABSENT:
            limit = len(hashes)
            for stride in _STRIDES:
                end = self._same_set(hashes, end, limit, stride)
                limit = min(limit, end + stride)
            end += 1
            ends.append(end)
            sets.append(held)
        return ends, sets, [-1] * len(ends)

    def tell(self, held: int, mask: bytes) -> None:
        """Who is in a set, by slot, a bit each, the lowest of the first byte first: for `runs`."""

    def run(self, hashes: array[int], start: int) -> tuple[int, int]:
        """The place behind the last of the hashes from `start` on, of 1,024 at most, that all have
        the same set, and that set, or ABSENT. Raises IndexError where no hash is at `start`."""
        if not 0 <= start < len(hashes):
            raise IndexError("a run begins at one of the hashes")
        limit = min(len(hashes), start + _MAX_RUN)
        return self._same_set(hashes, start, limit, 1) + 1, self._get(hashes[start])

    def _same_set(self, hashes: array[int], at: int, end: int, stride: int) -> int:
        held = self._get(hashes[at])
        while at + stride < end and self._get(hashes[at + stride]) == held:
            at += stride
        return at

    # Arguments as those of the extension, which a call by name would make slower.
    def change(self, hashes: array[int], start: int, end: int, old: int, new: int, /) -> int:
        """Give those of hashes[start:end] that have the set `old` the set `new`; either may be
        ABSENT. Returns how many. Raises IndexError where these are no places in `hashes`."""
        if not 0 <= start <= end <= len(hashes):
            raise IndexError("a stretch begins and ends within the hashes")
        changed = 0
        for chain_hash in hashes[start:end] if old != new else ():
            if self._get(chain_hash) == old:
                self._put(chain_hash, new)
                changed += 1
        self._used += changed * ((old == ABSENT) - (new == ABSENT))
        return changed

    def _put(self, chain_hash: int, new: int) -> None:
        shard = self._shards[chain_hash % SHARDS]
        if new == ABSENT:
            del shard[chain_hash]
        else:
            shard[chain_hash] = new

    def count(self, shard: int, instead: array[int]) -> dict[int, int]:
        """How many blocks of a shard have sets for which `instead`, by number of 32 bits ("I"), has
        another; beyond its end all sets stay. Raises IndexError where there is no such shard."""
        counts: dict[int, int] = {}
        for held in self._shards[_checked(shard)].values():
            if held < len(instead) and instead[held] != held:
                counts[held] = counts.get(held, 0) + 1
        return counts

    def replace(self, shard: int, instead: array[int]) -> None:
        """Give the blocks of a shard these sets instead of theirs."""
        for chain_hash, held in list(self._shards[_checked(shard)].items()):
            if held < len(instead) and instead[held] != held:
                self._put(chain_hash, instead[held])
                self._used -= instead[held] == ABSENT


def _checked(shard: int) -> int:
    if not 0 <= shard < SHARDS:
        raise IndexError("there is no such shard")
    return shard
