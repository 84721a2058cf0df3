"""What the two ends tell each other about a chunk, inside Inner messages of the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv_transfer.messages import Message, kinds_of


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Source: the chunk comes in so many parts."""

    kind: ClassVar[str] = "begin"
    parts: int


@dataclass(frozen=True, slots=True)
class Credit(Message):
    """Target: fill this slot of my ring, once."""

    kind: ClassVar[str] = "credit"
    slot: int


@dataclass(frozen=True, slots=True)
class Landed(Message):
    """Source: a part lies in the slot, and I write to it no more."""

    kind: ClassVar[str] = "landed"
    slot: int
    size_bytes: int


KINDS = kinds_of(Begin, Credit, Landed)
