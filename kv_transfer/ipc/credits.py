"""Which slots of a target's ring a source may fill, and when a slot of a link that went down may be
filled by another. Decides only; kv_transfer/ipc/channels.py does the work.

A slot of the ring:  free ─grant─► granted ─landed─► landed ─scattered─► free
                                      └── link down ──► quarantined ──► free

A granted slot is the source's to write, at a moment of its choosing. When the link is down the
target takes that right back: the fence (kv_transfer/memory.py) says when no copy runs and none can
begin. A source that was killed leaves the fence before the GPU has dropped its work, so a slot
rests a while longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

# One slot is filled while the one before is emptied.
MAX_GRANTED = 2
REST_S = 1.0


@dataclass(slots=True)
class ChunkCredits:
    """The slots of one chunk: so many `units` (kv_transfer/device/units.py) in `parts` parts, a
    slot each. Every grant is used, so none is left over when the chunk is whole."""

    units: int
    parts: int
    granted: set[int] = field(default_factory=set)
    landed_units: int = 0
    _grants: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= self.units:
            raise ProtocolError(f"{self.units} units in {self.parts} parts")

    @property
    def wants_slot(self) -> bool:
        """Whether one more slot is to be granted now."""
        return self._grants < self.parts and len(self.granted) < MAX_GRANTED

    @property
    def is_whole(self) -> bool:
        """Whether all parts have landed."""
        return self._grants == self.parts and not self.granted

    def grant(self, slot: int) -> None:
        """The source may fill the slot."""
        self._grants += 1
        self.granted.add(slot)

    def landed(self, slot: int, units: int) -> slice:
        """A part lies in the slot; answers which of the chunk's units it is. Raises ProtocolError
        where the slot was not granted, or the part is not what can be left."""
        if slot not in self.granted:
            raise ProtocolError(f"slot {slot} was filled, which was not granted")
        first, left = self.landed_units, self.units - self.landed_units
        later = self.parts - self._grants + len(self.granted) - 1
        if not 1 <= units <= left - later or (not later and units != left):
            raise ProtocolError(f"a part of {units} units with {left} and {later} parts to come")
        self.granted.remove(slot)
        self.landed_units += units
        return slice(first, first + units)


@dataclass(slots=True)
class _Quarantined:
    slots: set[int]
    is_sealed: Callable[[], bool]
    sealed_at: float | None = None


@dataclass(slots=True)
class Quarantine:
    """Slots that were granted over links that went down."""

    rest_s: float = REST_S
    _waiting: list[_Quarantined] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(each.slots) for each in self._waiting)

    def add(self, slots: set[int], is_sealed: Callable[[], bool]) -> None:
        """`is_sealed` says whether the link's source can write no more."""
        if slots:
            self._waiting.append(_Quarantined(slots, is_sealed))

    def take_safe(self, now: float) -> set[int]:
        """Slots that are nobody's any more, once each."""
        safe: set[int] = set()
        for each in list(self._waiting):
            if each.sealed_at is None and each.is_sealed():
                each.sealed_at = now
            if each.sealed_at is not None and now - each.sealed_at >= self.rest_s:
                self._waiting.remove(each)
                safe |= each.slots
        return safe
