"""Sets of workers, each kept once: many blocks are held by the same workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SetsFull(Exception):
    """There is no room for another distinct set."""


class SlotSets:
    """Sets of small numbers (slots) as bit masks, by id. State: masks, how often each is used,
    and the slots that have been taken out of use.

    Ids and masks are integers, which Python's garbage collector does not look at, however many
    there are. `max_sets` bounds the distinct sets that additions make. `tell` is called with each
    that is new and its mask as bytes, little-endian.
    """

    def __init__(self, max_sets: int, tell: Callable[[int, bytes], None]) -> None:
        self.masks: list[int] = []
        self.live = 0
        self._max_sets = max_sets
        self._tell = tell
        self._uses: list[int] = []
        self._by_mask: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._by_mask)

    def acquire(self, mask: int, *, beyond: bool = False) -> int:
        """The id of the set `mask`, used once more. Raises SetsFull, but `beyond` the bound: what
        becomes smaller must be told."""
        found = self._by_mask.get(mask)
        if found is not None:
            self._uses[found] += 1
            return found
        if len(self._by_mask) >= self._max_sets and not beyond:
            raise SetsFull
        if self._free:
            new = self._free.pop()
            self.masks[new], self._uses[new] = mask, 1
        else:
            new = len(self.masks)
            self.masks.append(mask)
            self._uses.append(1)
        self._by_mask[mask] = new
        self._tell(new, mask.to_bytes((mask.bit_length() + 7) // 8, "little"))
        return new

    def release(self, set_id: int, uses: int = 1) -> None:
        """The set is used so many times less."""
        self._uses[set_id] -= uses
        if not self._uses[set_id]:
            del self._by_mask[self.masks[set_id]]
            self.masks[set_id] = 0
            self._free.append(set_id)

    def reuse(self, set_id: int, uses: int) -> None:
        """A set that is in use is used so many times more."""
        self._uses[set_id] += uses
