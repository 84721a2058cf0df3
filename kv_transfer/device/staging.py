"""A ring of staging slots with its memory, shared by all links of a process in one direction: what
is sent and what is received never wait for each other's slots."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.device.slots import SlotRing
from kv_transfer.errors import KvTransferError, LinkClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.device.base import Device

# How often a wait looks whether its link is still up.
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """`slots` in each direction, of `slot_bytes` each; checked at birth."""

    slots: int = 4
    slot_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        # A link that holds one slot and asks for another gives the first back before it waits; two
        # let a link fill one while the other is on its way.
        if self.slots < 2 or self.slot_bytes < 1:
            raise ValueError(f"{self.slots} slots of {self.slot_bytes} bytes")

    @property
    def held_bytes(self) -> int:
        """Memory of one direction."""
        return self.slots * self.slot_bytes


def parts(count: int, block_bytes: int, slot_bytes: int) -> Iterator[slice]:
    """`count` blocks in runs that fit a slot. Raises KvTransferError where not one does."""
    step = slot_bytes // block_bytes
    if not step:
        raise KvTransferError(f"a slot of {slot_bytes} bytes holds no block of {block_bytes}")
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


class Staging:
    """See the top of the file. Released by `close`."""

    def __init__(self, device: Device, limits: StagingLimits) -> None:
        self.limits = limits
        self._device = device
        self._base = device.allocate(limits.slots * limits.slot_bytes)
        self._ring = SlotRing(limits.slots)
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def base(self) -> int:
        """Address of the first slot; the others follow."""
        return self._base

    @property
    def held(self) -> int:
        """Slots that somebody has to give back."""
        with self._changed:
            return self._ring.held

    @property
    def lost(self) -> int:
        """Slots that are unsafe for good."""
        with self._changed:
            return self._ring.lost

    def address(self, slot: int) -> int:
        """Where the slot lies."""
        return self._base + slot * self.limits.slot_bytes

    def try_acquire(self) -> int | None:
        """A slot, which the caller owes `release` or `lose`, or None where all are taken."""
        with self._changed:
            return self._ring.acquire()

    def acquire(self, timeout_s: float, is_down: Callable[[], bool]) -> int:
        """A slot, waited for: by who holds none, else all could wait for each other. Raises
        LinkClosed when the link went down, KvTransferError when it took too long."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while (slot := self._ring.acquire()) is None:
                if is_down():
                    raise LinkClosed("the link went down")
                if time.monotonic() >= end:
                    raise KvTransferError(f"no staging slot was free for {timeout_s:g} s")
                self._changed.wait(LOOK_S)
            return slot

    def release(self, slot: int) -> None:
        """The slot may be filled anew."""
        with self._changed:
            self._ring.release(slot)
            self._changed.notify_all()

    def lose(self, slot: int) -> None:
        """The slot may yet be written to, or read: it is not given out again."""
        with self._changed:
            self._ring.lose(slot)

    def close(self) -> bool:
        """Frees the memory; False where somebody may still use it: then it stays. Idempotent."""
        with self._changed:
            if not self._is_closed and not self._ring.held and not self._ring.lost:
                self._is_closed = True
                self._device.free(self._base)
        return self._is_closed
