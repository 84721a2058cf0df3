"""The slots of a staging ring: who may fill which. Their memory is in staging.py."""

from __future__ import annotations

from kv_transfer.errors import KvTransferError


class SlotRing:
    """`count` slots. A slot is free, held, or lost: a lost one may yet be written to by a GPU that
    did not come to rest, and is not given out again while the process lives."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} slots")
        self._count = count
        self._free = list(range(count))
        self._lost: set[int] = set()

    @property
    def free(self) -> int:
        """How many can be acquired."""
        return len(self._free)

    @property
    def lost(self) -> int:
        """How many never come back."""
        return len(self._lost)

    @property
    def held(self) -> int:
        """How many somebody has to release."""
        return self._count - self.free - self.lost

    def acquire(self) -> int | None:
        """A slot, which the caller owes `release` or `lose`; None when all are taken: the caller's
        chunk waits, nothing is allocated in its place."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """The slot's bytes are used up. Raises KvTransferError where it was not held."""
        self._check(slot)
        self._free.append(slot)

    def lose(self, slot: int) -> None:
        """The slot is unsafe for good."""
        self._check(slot)
        self._lost.add(slot)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self._count or slot in self._free or slot in self._lost:
            raise KvTransferError(f"slot {slot} is not held")
