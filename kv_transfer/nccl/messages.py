"""What the two ends of a pair tell each other beside NCCL. All name the communicator's generation;
what names another than the present one is stale and means nothing. They travel on the link, inside
an Inner message (kv_transfer/messages.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kv_transfer.messages import Message, kinds_of


@dataclass(frozen=True, slots=True)
class Identify(Message):
    """Sender: join the communicator of this id."""

    kind: ClassVar[str] = "identify"
    generation: int
    unique_id: bytes


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Sender: the bytes are staged and will be posted at your word."""

    kind: ClassVar[str] = "offer"
    generation: int
    op_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Clear(Message):
    """Receiver: posted; post yours."""

    kind: ClassVar[str] = "clear"
    generation: int
    op_id: str


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """Receiver: this offer is not what was agreed; nothing was posted."""

    kind: ClassVar[str] = "refuse"
    generation: int
    op_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Either: I abort my side; abort yours."""

    kind: ClassVar[str] = "abort"
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Either: I end my side in order; end yours."""

    kind: ClassVar[str] = "finish"
    generation: int


PairMessage = Identify | Offer | Clear | Refuse | Abort | Finish


@dataclass(frozen=True, slots=True)
class Moved(Message):
    """Sender, of a chunk: all its operations have ended well, and what follows on the link is no
    part of it."""

    kind: ClassVar[str] = "moved"


KINDS = kinds_of(Identify, Offer, Clear, Refuse, Abort, Finish, Moved)
