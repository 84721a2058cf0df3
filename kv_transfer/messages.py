"""What travels on a link: small msgpack maps behind a four-byte length, and a CRC-32 behind each: a
bit that flips in a token id or a block id must not pass for another.

A link joins one target worker (it dialled, it receives KV) and one source worker. On connecting:
target → Hello, source → Welcome or Refusal. Then target → Grant, Again, Cancel, Ack; source
→ Chunk (with the payload behind it where the transport sends bytes on the link), Done, Fail, Alive.
Either end → Inner, which is the transport's own.

PROTOCOL_VERSION history: 1 first version. 2 Hello names its worker; Grant and Cancel have a
capability. 3 Chunk has a digest; Again; Grant says which heads, and how many readers; messages
have a CRC. 4 msgspec writes them. 5 Grant says the size of its blocks, Chunk how many tokens move.
6 Taken; Grant may be suspect; shm tells where the source's own memory is. 7 Grant is never suspect.
8 No capabilities; no Taken.
"""

from __future__ import annotations

import functools
import operator
import struct
from typing import Annotated, Any
from zlib import crc32

import msgspec

from kv_transfer.errors import ProtocolError
from kv_transfer.reshard import Span

PROTOCOL_VERSION = 8
MAX_MESSAGE_BYTES = 4 << 20
# Of a peer that has not introduced itself, less is taken.
MAX_HANDSHAKE_BYTES = 64 << 10
HEADER = struct.Struct("<I")
_CRC = struct.Struct("<I")


Count = Annotated[int, msgspec.Meta(ge=0)]
# With an upper end, which infinity is not below.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Message(
    msgspec.Struct, frozen=True, tag_field="t", tag=str.lower, forbid_unknown_fields=True
):
    """Base of all messages. The name of its class, in small letters, is its tag on the wire."""

    @property
    def kind(self) -> str:
        """What it is, for people."""
        return type(self).__name__.lower()

    def __repr__(self) -> str:
        shown = (f"{k}={getattr(self, k)!r}" for k in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"


class Hello(Message, frozen=True):
    """The target's first message. `offers` are its transports in order of preference, each with
    what the source needs to use it. Its fields stay the same from version 2 on, so that the source
    can name the version that it refuses. The rights of `worker_id` and `instance_id` are
    checked."""

    version: Count
    instance_id: str
    producer_instance_id: str
    compatibility: str
    offers: list[dict[str, Any]]


class Welcome(Message, frozen=True):
    """The source's answer: the transport that it chose of those offered."""

    instance_id: str
    transport: str


class Refusal(Message, frozen=True):
    """The source's answer when nothing can move between the two, and why."""

    reason: str


class Grant(Message, frozen=True):
    """The target has reserved `block_ids` for tokens [first_block * block_size, num_tokens) of the
    request. This is the credit: nothing is sent before it. `heads` says which KV heads, of those
    that lie in the source's pages: the first, how many, and how many lie before them in the
    target's pages; empty for whole pages that hold the same on both sides. So many `readers` of the
    target ask this source rank. `block_size` is how many tokens a block of the target's has; 0
    where it is the source's."""

    transfer_id: str
    first_block: Count
    num_tokens: Count
    block_ids: list[Count]
    heads: list[Count] = []
    readers: Count = 1
    block_size: Count = 0

    def tokens_in(self, first: int, count: int) -> int:
        """How many tokens of the request lie in so many blocks from block `first` of the grant; 0
        where the block size is not said."""
        start = (self.first_block + first) * self.block_size
        end = start + count * self.block_size
        return min(end, self.num_tokens) - start if self.block_size else 0


class Again(Message, frozen=True):
    """What came as block `first` of the grant is not what was sent. The source goes back to it:
    that block and all behind it come again, and Done behind them."""

    transfer_id: str
    first: Count


class Cancel(Message, frozen=True):
    """The target no longer wants it. The source answers Fail behind its last chunk."""

    transfer_id: str


class Ack(Message, frozen=True):
    """The target has every byte: the source may free the blocks."""

    transfer_id: str


class Chunk(Message, frozen=True):
    """`count` blocks from block `first` (counted within the grant) are in place, or follow.
    `digest` is that of their bytes (kv_transfer/digest.py), 0 where none was made. `tokens` is how
    many tokens of the request lie in them, where the two ends' blocks differ in size and tokens
    move; 0 where whole blocks do."""

    transfer_id: str
    first: Count
    count: Count
    bytes: Count
    digest: Count = 0
    tokens: Count = 0

    def span(self) -> Span | None:
        """What of the target's blocks is filled; None where whole blocks move."""
        return Span(0, self.tokens) if self.tokens else None

    def check_layers(self, num_layers: int) -> None:
        """Raises ProtocolError where the bytes cannot be shared out to so many layers."""
        pages = (self.tokens or self.count) * num_layers
        self.check_size(self.bytes - self.bytes % pages if pages else 0)

    def check_size(self, size_bytes: int) -> None:
        """Raises ProtocolError where what moves should be another number of bytes: this one."""
        if self.bytes != size_bytes:
            what = f"{self.tokens} tokens" if self.tokens else f"{self.count} blocks"
            raise ProtocolError(f"{what} are not {self.bytes} bytes long")


class Done(Message, frozen=True):
    """All granted blocks were sent; `token_ids` is what the source sampled. `push_s` is the time in
    which bytes were moving, `exposed_s` the part of it after prefill had ended."""

    transfer_id: str
    token_ids: list[Count]
    push_s: Seconds
    exposed_s: Seconds


class Fail(Message, frozen=True):
    """Nothing more comes for this transfer."""

    transfer_id: str
    reason: str


class Alive(Message, frozen=True):
    """The source still works on these granted transfers."""

    transfer_ids: list[str]


class Inner(Message, frozen=True):
    """What the two ends of the link's transport tell each other: a message of the transport's own
    kinds, as `pack` writes it."""

    body: bytes


Bytes = bytes | bytearray | memoryview
Kinds = msgspec.msgpack.Decoder[Message]


def kinds_of(*classes: type[Message]) -> Kinds:
    """What `decode` reads by."""
    union: Any = functools.reduce(operator.or_, classes)
    return msgspec.msgpack.Decoder(union)


_KINDS = kinds_of(
    Hello, Welcome, Refusal, Grant, Again, Cancel, Ack, Chunk, Done, Fail, Alive, Inner
)
_WRITER = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    """The message by itself."""
    body = _WRITER.encode(message)
    return body + _CRC.pack(crc32(body))


def encode(message: Message) -> bytes:
    """The message with its length in front."""
    body = _WRITER.encode(message)
    length = len(body) + _CRC.size
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {message.kind} message of {length} bytes is over the limit")
    return b"".join((HEADER.pack(length), body, _CRC.pack(crc32(body))))


def body_length(header: Bytes, limit: int = MAX_MESSAGE_BYTES) -> int:
    """The body's length; raises ProtocolError when it is none or over the limit."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= limit:
        raise ProtocolError(f"a message of {length} bytes, where 1 to {limit} are taken")
    return int(length)


def decode(body: Bytes, kinds: Kinds = _KINDS) -> Message:
    """The message in `body`, of one of `kinds`; raises ProtocolError on anything else. Numbers are
    finite and not negative."""
    end = len(body) - _CRC.size
    if end < 0 or body[end:] != _CRC.pack(crc32(body[:end])):
        raise ProtocolError(f"a message came damaged, or is none of version {PROTOCOL_VERSION}")
    try:
        return kinds.decode(body[:end])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message makes no sense: {error}") from error
