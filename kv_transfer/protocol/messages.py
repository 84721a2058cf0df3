"""Messages between a producer and a consumer of KV.

A message is a msgpack map with a four-byte length before it and a CRC-32 after it. The CRC exists
because a flipped bit in a token id or block id would give another valid value.

The consumer dials. Handshake: consumer -> Hello, producer -> Welcome, consumer -> Select; either
side may answer RefuseHandshake. Then consumer -> Subscribe, Nack, Cancel, Ack; producer ->
ChunkReady (the transport's payload follows it, if it sends one on the link), TransferDone, Fail,
Heartbeat. Inner carries a transport's own messages in both directions.
"""

from __future__ import annotations

import functools
import operator
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from zlib import crc32

import msgspec
from msgspec import Meta

from kv_transfer.errors import ProtocolError

PROTOCOL_VERSION = 13
MAX_MESSAGE_BYTES = 4 << 20
MAX_HANDSHAKE_BYTES = 64 << 10
MAX_ID_CHARS = 256
MAX_GROUPS = 1024  # of layers that share a KV cache
HEADER = struct.Struct("<I")
_CRC = struct.Struct("<I")

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # the upper bound excludes infinity


class KvMessage(
    msgspec.Struct, frozen=True, tag_field="t", tag=str.lower, forbid_unknown_fields=True
):
    """Base of all messages. The tag on the wire is the lower-case class name unless another is
    given."""


class Hello(KvMessage, frozen=True, omit_defaults=True):
    """Introduce a consumer to the producer instance `producer_instance_id`.

    `transports` are names in the consumer's order of preference. The producer must sign `nonce`
    (auth.py). `tls`: TLS goes on after the handshake; the producer must want the same. Version 0.1
    does not know it, and refuses the message if it is true. Every version of the protocol reads
    `version` first.
    """

    version: Count
    instance_id: str
    producer_instance_id: str
    compatibility: str
    transports: list[str]
    nonce: bytes
    tls: bool = False


class Welcome(KvMessage, frozen=True):
    """Offer the transports that both ends know, each with the data that the consumer needs.
    `boot_id` is equal on workers of one host (cache/host_memory.py)."""

    instance_id: str
    boot_id: str
    offers: list[dict[str, Any]]
    nonce: bytes
    proof: bytes


class Select(KvMessage, frozen=True):
    """Select one of the offers; `details` is the data that the producer needs for it."""

    transport: str
    details: dict[str, Any]
    proof: bytes


class RefuseHandshake(KvMessage, frozen=True, tag="refusal"):
    """End a handshake and state the reason."""

    reason: str


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks of the consumer in one KV-cache group.

    `block_ids` receive the blocks of the sequence from `first_block` on. `heads`: (first KV head of
    the model, number of heads, number of heads before them in the consumer's page). `layers`: the
    same for the group's layers, in the consumer's cache.
    """

    group: Count
    first_block: Count
    block_ids: list[Count]
    heads: list[Count]
    layers: list[Count]


class Subscribe(KvMessage, frozen=True):
    """Request the KV that the token after the first `num_tokens` needs, into these blocks.

    The blocks of all groups, concatenated, are the blocks of the subscription; other messages use
    indices into them. `readers` consumer ranks subscribe at this producer rank.
    """

    transfer_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)]
    num_tokens: Count
    groups: Annotated[list[GroupBlocks], Meta(max_length=MAX_GROUPS)]
    readers: Count = 1

    @property
    def num_blocks(self) -> int:
        return sum(len(each.block_ids) for each in self.groups)

    @property
    def num_items(self) -> int:
        """Return the number of integers in the subscription."""
        return sum(len(g.block_ids) + len(g.heads) + len(g.layers) for g in self.groups)

    def locate(self, block: int) -> tuple[int, int]:
        """Return the position of block `block` of the subscription: (index in `groups`, index in
        that group's `block_ids`). Raises IndexError."""
        for place, each in enumerate(self.groups):
            if block < len(each.block_ids):
                return place, block
            block -= len(each.block_ids)
        raise IndexError(f"block {block} behind the end of a subscription")


class Nack(KvMessage, frozen=True):
    """Request block `first` and all later ones again, once: after TransferDone, its digest did not
    match."""

    transfer_id: str
    first: Count


class Cancel(KvMessage, frozen=True):
    """End a subscription. The producer stops sending for it."""

    transfer_id: str


class Ack(KvMessage, frozen=True):
    """Confirm that every block has arrived, so that the producer may release its blocks."""

    transfer_id: str


class ChunkReady(KvMessage, frozen=True):
    """Announce `count` blocks, all of one group, from block `first` of the subscription: `size`
    bytes.

    `block_ids`: the producer's blocks, for transports whose consumer copies by itself.
    """

    transfer_id: str
    first: Count
    count: Count
    size: Count
    block_ids: list[Count] = []


class TransferDone(KvMessage, frozen=True, tag="done", omit_defaults=True):
    """End a complete transfer. `token_ids` are the tokens that the producer sampled.

    `digests` has eight bytes for each block of the subscription (cache/host_memory.py), computed
    during the transfer. `transfer_s` is the time in which bytes moved, `exposed_s` the time since
    the end of prefill. `undigested`: number of blocks without a digest after each block with one.
    It is omitted on the wire if 0, because workers of version 0.1 do not know it.
    """

    transfer_id: str
    token_ids: list[Count]
    digests: bytes
    transfer_s: Seconds
    exposed_s: Seconds
    undigested: Count = 0


class Fail(KvMessage, frozen=True):
    """End a transfer that cannot be completed."""

    transfer_id: str
    reason: str


class Heartbeat(KvMessage, frozen=True):
    """Report that the producer still works on this transfer."""

    transfer_id: str


class Inner(KvMessage, frozen=True):
    """Carry a message of the transport, encoded by `pack`."""

    body: bytes


LinkT = TypeVar("LinkT")


@dataclass(frozen=True, slots=True)
class Send(Generic[LinkT]):
    """Action of a state machine: send `message` over `link`."""

    link: LinkT
    message: KvMessage


Bytes = bytes | bytearray | memoryview
Kinds = msgspec.msgpack.Decoder[KvMessage]


def kinds_of(*classes: type[KvMessage]) -> Kinds:
    """Return the decoder of a set of messages, for `decode`."""
    union: Any = functools.reduce(operator.or_, classes)
    return msgspec.msgpack.Decoder(union)


_KINDS = kinds_of(*KvMessage.__subclasses__())  # the classes above; transports define more
_ENCODER = msgspec.msgpack.Encoder()


def pack(message: KvMessage) -> bytes:
    """Encode a message with its CRC, without its length."""
    body = _ENCODER.encode(message)
    return body + _CRC.pack(crc32(body))


def encode(message: KvMessage) -> bytes:
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


def decode(body: Bytes, kinds: Kinds = _KINDS) -> KvMessage:
    """Decode a message encoded by `pack`. Raises ProtocolError."""
    end = len(body) - _CRC.size
    if end < 0 or body[end:] != _CRC.pack(crc32(body[:end])):
        raise ProtocolError(f"CRC mismatch, or not protocol version {PROTOCOL_VERSION}")
    try:
        return kinds.decode(body[:end])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid message: {error}") from error
