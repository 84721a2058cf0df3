"""What the two ends of a pair tell each other beside NCCL. All name the communicator's generation;
what names another than the present one is stale and means nothing. They travel on the link, inside
an Inner message (kv_transfer/messages.py)."""

from __future__ import annotations

from kv_transfer.messages import Count, Message, kinds_of


class Identify(Message, frozen=True):
    """Sender: join the communicator of this id."""

    generation: Count
    unique_id: bytes


class Offer(Message, frozen=True):
    """Sender: the bytes are staged and will be posted at your word."""

    generation: Count
    op_id: str
    size_bytes: Count


class Clear(Message, frozen=True):
    """Receiver: posted; post yours."""

    generation: Count
    op_id: str


class Refuse(Message, frozen=True):
    """Receiver: this offer is not what was agreed; nothing was posted."""

    generation: Count
    op_id: str
    reason: str


class Abort(Message, frozen=True):
    """Either: I abort my side; abort yours."""

    generation: Count
    reason: str


class Finish(Message, frozen=True):
    """Either: I end my side in order; end yours."""

    generation: Count


PairMessage = Identify | Offer | Clear | Refuse | Abort | Finish


class Moved(Message, frozen=True):
    """Sender, of a chunk: all its operations have ended well, and what follows on the link is no
    part of it."""


KINDS = kinds_of(Identify, Offer, Clear, Refuse, Abort, Finish, Moved)
