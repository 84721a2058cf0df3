"""What travels on a link: small msgpack maps behind a four-byte length, and a CRC-32 behind each
once the handshake is over: a bit that flips in a token id or a block id must not pass for another.

A link joins one target worker (it dialled, it receives KV) and one source worker. On connecting:
target → Hello, source → Welcome or Refusal. Then target → Grant, Again, Cancel, Ack; source → Chunk
(with the payload behind it where the transport sends bytes on the link), Done, Fail, Alive. Either
end → Inner, which is the transport's own.

PROTOCOL_VERSION history: 1 first version. 2 Hello names its worker; Grant and Cancel have a
capability. 3 Chunk has a digest; Again; Grant says which heads, and how many readers; messages
have a CRC.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import msgpack

from kv_transfer.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 4 << 20
# Of a peer that has not introduced itself, less is taken.
MAX_HANDSHAKE_BYTES = 64 << 10
HEADER = struct.Struct("<I")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; `kind` is their tag on the wire."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The target's first message. `offers` are its transports in order of preference, each with
    what the source needs to use it. Its fields stay the same from version 2 on, so that the source
    can name the version that it refuses. The rights of `worker_id` and `epoch` are checked."""

    kind: ClassVar[str] = "hello"
    version: int
    epoch: str
    source_epoch: str
    compatibility: str
    offers: list[dict[str, Any]]
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The source's answer: the transport that it chose of those offered."""

    kind: ClassVar[str] = "welcome"
    epoch: str
    transport: str


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The source's answer when nothing can move between the two, and why."""

    kind: ClassVar[str] = "refusal"
    reason: str


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """The target has reserved `block_ids` for tokens [first_block * block_size, num_tokens) of the
    request. This is the credit: nothing is sent before it. `capability` is the router's word that
    the target may have them. `heads` says which KV heads, of those that lie in the source's pages:
    the first, how many, and how many lie before them in the target's pages; empty for whole pages
    that hold the same on both sides. So many `readers` of the target ask this source rank."""

    kind: ClassVar[str] = "grant"
    transfer_id: str
    first_block: int
    num_tokens: int
    block_ids: list[int]
    capability: str = field(default="", repr=False)
    heads: list[int] = field(default_factory=list)
    readers: int = 1


@dataclass(frozen=True, slots=True)
class Again(Message):
    """What came as block `first` of the grant is not what was sent. The source goes back to it:
    that block and all behind it come again, and Done behind them."""

    kind: ClassVar[str] = "again"
    transfer_id: str
    first: int


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The target no longer wants it. The source answers Fail behind its last chunk."""

    kind: ClassVar[str] = "cancel"
    transfer_id: str
    capability: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The target has every byte: the source may free the blocks."""

    kind: ClassVar[str] = "ack"
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Chunk(Message):
    """`count` blocks from block `first` (counted within the grant) are in place, or follow.
    `digest` is that of their bytes (kv_transfer/digest.py), 0 where none was made."""

    kind: ClassVar[str] = "chunk"
    transfer_id: str
    first: int
    count: int
    bytes: int
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Done(Message):
    """All granted blocks were sent; `token_ids` is what the source sampled. `push_s` is the time in
    which bytes were moving, `exposed_s` the part of it after prefill had ended."""

    kind: ClassVar[str] = "done"
    transfer_id: str
    token_ids: list[int]
    push_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Fail(Message):
    """Nothing more comes for this transfer."""

    kind: ClassVar[str] = "fail"
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """The source still works on these granted transfers."""

    kind: ClassVar[str] = "alive"
    transfer_ids: list[str]


@dataclass(frozen=True, slots=True)
class Inner(Message):
    """What the two ends of the link's transport tell each other: a message of the transport's own
    kinds, as `pack` writes it."""

    kind: ClassVar[str] = "inner"
    body: bytes


def kinds_of(*classes: type[Message]) -> dict[str, type[Message]]:
    """A table that `decode` reads by."""
    return {cls.kind: cls for cls in classes}


_KINDS = kinds_of(
    *(Hello, Welcome, Refusal, Grant, Again, Cancel, Ack, Chunk, Done, Fail, Alive, Inner)
)
# Without a CRC, as in version 2: for these say which version it is.
_HANDSHAKE = (Hello, Welcome, Refusal)
_CHECKS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bytes": (bytes,),
    "float": (float, int),
    "list[int]": (list,),
    "list[str]": (list,),
    "list[dict[str, Any]]": (list,),
}
_ITEMS: dict[str, type] = {"list[int]": int, "list[str]": str, "list[dict[str, Any]]": dict}


# The names and types of each kind's fields.
_FIELDS: dict[type[Message], dict[str, str]] = {}


def _fields_of(cls: type[Message]) -> dict[str, str]:
    if cls not in _FIELDS:
        _FIELDS[cls] = {f.name: str(f.type) for f in fields(cls)}
    return _FIELDS[cls]


def pack(message: Message) -> bytes:
    """The message by itself."""
    values: dict[str, Any] = {"t": message.kind}
    for name in _fields_of(type(message)):
        values[name] = getattr(message, name)
    body: bytes = msgpack.packb(values)
    if not isinstance(message, _HANDSHAKE):
        body += _CRC.pack(crc32(body))
    return body


def encode(message: Message) -> bytes:
    """The message with its length in front."""
    body = pack(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {message.kind} message of {len(body)} bytes is over the limit")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes, limit: int = MAX_MESSAGE_BYTES) -> int:
    """The body's length; raises ProtocolError when it is none or over the limit."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= limit:
        raise ProtocolError(f"a message of {length} bytes, where 1 to {limit} are taken")
    return int(length)


def _fits(value: Any, annotation: str) -> bool:
    kinds: Any = _CHECKS[annotation]
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    if annotation in _ITEMS:
        # A grant may list thousands of blocks: no Python step for each.
        item = _ITEMS[annotation]
        return not value or (
            set(map(type, value)) == {item} and (item is not int or min(value) >= 0)
        )
    if annotation == "float":
        return math.isfinite(value) and value >= 0
    return annotation != "int" or value >= 0


def decode(body: bytes, kinds: Mapping[str, type[Message]] = _KINDS) -> Message:
    """The message in `body`, of one of `kinds`; raises ProtocolError on anything else. Numbers are
    finite and not negative."""
    # A limit of its size: a length inside must not make us allocate more than there is.
    unpacker = msgpack.Unpacker(strict_map_key=True, max_buffer_size=len(body) or 1)
    unpacker.feed(body)
    try:
        raw = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError("a message is not msgpack") from error
    if not isinstance(raw, dict):
        raise ProtocolError("a message is not a map")
    cls = kinds.get(str(raw.pop("t", "")))
    if cls is None:
        raise ProtocolError("a message is of no known kind")
    end = unpacker.tell()
    crc = b"" if cls in _HANDSHAKE else _CRC.pack(crc32(body[:end]))
    if body[end:] != crc:
        raise ProtocolError(f"a {cls.kind} message came damaged")
    names = _fields_of(cls)
    if raw.keys() != names.keys():
        raise ProtocolError(f"a {cls.kind} message has the wrong fields")
    for name, annotation in names.items():
        if not _fits(raw[name], annotation):
            raise ProtocolError(f"{cls.kind}.{name} is not {annotation}")
    return cls(**raw)
