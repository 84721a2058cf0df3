"""Messages between a producer and a consumer of KV.

A message is a msgpack map with a four-byte length before it and a CRC-32 behind it, because a bit
flip in a token id or a block id must not pass for another value.

The consumer dials. Handshake: consumer -> Hello, producer -> Welcome, consumer -> Select; either
side may answer Refusal. Then consumer -> Subscribe, Nack, Cancel, Ack; producer -> ChunkReady (the
transport's payload follows it, if it sends one on the link), Done, Fail, Heartbeat. Inner carries a
transport's own messages in both directions.
"""

from __future__ import annotations

import functools
import operator
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from zlib import crc32

import msgspec

from kv_transfer.errors import ProtocolError

PROTOCOL_VERSION = 12
MAX_MESSAGE_BYTES = 4 << 20
MAX_HANDSHAKE_BYTES = 64 << 10
HEADER = struct.Struct("<I")
_CRC = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # the upper bound excludes infinity


class Message(
    msgspec.Struct, frozen=True, tag_field="t", tag=str.lower, forbid_unknown_fields=True
):
    """Base of all messages. The lower-case class name is the tag on the wire."""


class Hello(Message, frozen=True):
    """Introduce a consumer to the producer start `producer_instance_id`.

    `transports` are names in the consumer's order of preference. `nonce` is what the producer must
    sign (auth.py). `version` is read before anything else, in every version of the protocol.
    """

    version: Count
    instance_id: str
    producer_instance_id: str
    compatibility: str
    transports: list[str]
    nonce: bytes


class Welcome(Message, frozen=True):
    """Offer the transports that both ends know, each with what the consumer needs to use it.
    `boot_id` is equal on workers of one host (memory.py)."""

    instance_id: str
    boot_id: str
    offers: list[dict[str, Any]]
    nonce: bytes
    proof: bytes


class Select(Message, frozen=True):
    """Choose one of the offers; `details` is what the producer needs to use it."""

    transport: str
    details: dict[str, Any]
    proof: bytes


class Refusal(Message, frozen=True):
    """End a handshake, with the reason."""

    reason: str


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks of the consumer in one KV-cache group: `block_ids` are for the blocks of the sequence
    from `first_block` on. `heads`: first KV head of the model, number of heads, and number of heads
    before them in the consumer's page."""

    group: Count
    first_block: Count
    block_ids: list[Count]
    heads: list[Count]


class Subscribe(Message, frozen=True):
    """Reserve blocks of the consumer for what the token after the first `num_tokens` needs.

    The blocks of all groups, one after the other, are the blocks of the subscription; other
    messages count in them. `readers` consumer ranks subscribe at this producer.
    """

    transfer_id: str
    num_tokens: Count
    groups: list[GroupBlocks]
    readers: Count = 1

    @property
    def num_blocks(self) -> int:
        return sum(len(each.block_ids) for each in self.groups)

    def locate(self, block: int) -> tuple[int, int]:
        """Return where block `block` of the subscription is: (place in `groups`, place in its
        `block_ids`). Raises IndexError."""
        for place, each in enumerate(self.groups):
            if block < len(each.block_ids):
                return place, block
            block -= len(each.block_ids)
        raise IndexError(f"block {block} behind the end of a subscription")


class Nack(Message, frozen=True):
    """Ask once for block `first` and all after it again: after Done, its digest did not match."""

    transfer_id: str
    first: Count


class Cancel(Message, frozen=True):
    """End a subscription. The producer sends nothing more for it."""

    transfer_id: str


class Ack(Message, frozen=True):
    """Confirm that every block is in place, so that the producer may release its own."""

    transfer_id: str


class ChunkReady(Message, frozen=True):
    """Announce `count` blocks, all of one group, from block `first` of the subscription: `size`
    bytes.

    `block_ids` are the producer's blocks, for a transport that lets the consumer copy by itself.
    """

    transfer_id: str
    first: Count
    count: Count
    size: Count
    block_ids: list[Count] = []


class Done(Message, frozen=True):
    """End a transfer that is complete. `token_ids` are the tokens that the producer sampled.

    `digests` has eight bytes for each block of the subscription (memory.py), made while the blocks
    moved. `transfer_s` is the time in which bytes moved, `exposed_s` the time since the end of
    prefill.
    """

    transfer_id: str
    token_ids: list[Count]
    digests: bytes
    transfer_s: Seconds
    exposed_s: Seconds


class Fail(Message, frozen=True):
    """End a transfer that will not be completed."""

    transfer_id: str
    reason: str


class Heartbeat(Message, frozen=True):
    """Say that the producer still works on this transfer."""

    transfer_id: str


class Inner(Message, frozen=True):
    """Carry a message of the transport, as `pack` writes it."""

    body: bytes


LinkT = TypeVar("LinkT")


@dataclass(frozen=True, slots=True)
class Send(Generic[LinkT]):
    """Action of a state machine: send `message` over `link`."""

    link: LinkT
    message: Message


Bytes = bytes | bytearray | memoryview
Kinds = msgspec.msgpack.Decoder[Message]


def kinds_of(*classes: type[Message]) -> Kinds:
    """Return the decoder of a set of messages, for `decode`."""
    union: Any = functools.reduce(operator.or_, classes)
    return msgspec.msgpack.Decoder(union)


_KINDS = kinds_of(*Message.__subclasses__())  # those above; transports make more of their own
_ENCODER = msgspec.msgpack.Encoder()


def pack(message: Message) -> bytes:
    """Encode a message without its length."""
    body = _ENCODER.encode(message)
    return body + _CRC.pack(crc32(body))


def encode(message: Message) -> bytes:
    """Encode a message with its length. Raises ProtocolError if it is too long."""
    body = pack(message)
    if len(body) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ProtocolError(f"{name} of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return HEADER.pack(len(body)) + body


def body_length(header: Bytes, limit: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length in a header. Raises ProtocolError if it is 0 or above `limit`."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= limit:
        raise ProtocolError(f"message length {length} is not in 1 to {limit}")
    return int(length)


def decode(body: Bytes, kinds: Kinds = _KINDS) -> Message:
    """Decode what `pack` wrote. Raises ProtocolError."""
    end = len(body) - _CRC.size
    if end < 0 or body[end:] != _CRC.pack(crc32(body[:end])):
        raise ProtocolError(f"CRC mismatch, or not protocol version {PROTOCOL_VERSION}")
    try:
        return kinds.decode(body[:end])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid message: {error}") from error
