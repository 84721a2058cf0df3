"""What the two ends of a pair tell each other beside NCCL. All name the communicator's generation;
what names another than the present one is stale and means nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identify:
    """Sender: join the communicator of this id."""

    generation: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """Sender: the bytes are staged and will be posted at your word."""

    generation: int
    op_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Receiver: posted; post yours."""

    generation: int
    op_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Receiver: this offer is not what was agreed; nothing was posted."""

    generation: int
    op_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Either: I abort my side; abort yours."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Either: I end my side in order; end yours."""

    generation: int


PairMessage = Identify | Offer | Clear | Refuse | Abort | Finish
