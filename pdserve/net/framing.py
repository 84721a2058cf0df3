"""Frames between a router and its workers, and between a process and its children
(pdserve/process/child_pool.py): one message after its length, 4 bytes, big-endian.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_FRAME_BYTES = 64 << 20
# The connection is closed if more bytes than this wait for a slow reader.
MAX_UNSENT_BYTES = 16 << 20
# The kernel closes a connection whose peer's machine has not answered for this many seconds.
PEER_TIMEOUT_S = 15

_LENGTH = struct.Struct(">I")

M = TypeVar("M", bound=Message | bytes)


def pack(message: Message, more: bytes = b"") -> bytes:
    """Return the bytes of one frame. `more`: bytes of a message that the reader merges into
    `message`. Raises ValueError above MAX_FRAME_BYTES."""
    body = message.SerializeToString() + more
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame(body)


def frame(body: bytes) -> bytes:
    """Return the frame of a message of any length, which its reader has to accept."""
    return _LENGTH.pack(len(body)) + body


class FrameParser(Generic[M]):
    """Parses a byte stream into messages of `kind`, protobuf or bytes, with at most `limit` bytes
    each. State: the bytes of an incomplete frame."""

    def __init__(self, kind: type[M], limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._name = kind.__name__
        self._decode: Callable[[bytes], M] = getattr(kind, "FromString", kind)
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Add `data` and yield the messages that are now complete. Raises InvalidRequest for a
        malformed frame."""
        rest = self._rest
        rest += data
        while len(rest) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(rest)
            if size > self.limit:
                raise InvalidRequest(
                    f"a frame of {size} bytes exceeds the limit of {self.limit}", field="frame"
                )
            end = _LENGTH.size + size
            if len(rest) < end:
                return
            body = bytes(rest[_LENGTH.size : end])
            del rest[:end]  # O(1): a bytearray only advances its start
            try:
                message = self._decode(body)
            except DecodeError:
                raise InvalidRequest(f"the frame is not a {self._name}", field="frame") from None
            yield message
