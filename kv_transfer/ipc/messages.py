"""What the two ends tell each other about a chunk, inside Inner messages of the link."""

from __future__ import annotations

from kv_transfer.messages import Count, Message, kinds_of


class Begin(Message, frozen=True):
    """Source: the chunk comes in so many parts."""

    parts: Count


class Credit(Message, frozen=True):
    """Target: fill this slot of my ring, once."""

    slot: Count


class Landed(Message, frozen=True):
    """Source: a part lies in the slot, and I write to it no more."""

    slot: Count
    size_bytes: Count


KINDS = kinds_of(Begin, Credit, Landed)
