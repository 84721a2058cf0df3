"""Frames between a router and its workers or parser: one protobuf message after its length.

The length is 4 bytes, big-endian. worker.proto and parser.proto of protos/pdserve/v1 say what the
messages mean.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FRAME_BYTES = 64 << 20
# A peer that reads slower than we write is dropped beyond this.
MAX_UNSENT_BYTES = 16 << 20
# Seconds without an answer after which the kernel gives up a peer whose machine is gone.
PEER_TIMEOUT_S = 15

_LENGTH = struct.Struct(">I")

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """Return the bytes of one frame. Raises ValueError above MAX_FRAME_BYTES."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameParser(Generic[M]):
    """Turns a byte stream into messages of `kind`, of at most `limit` bytes. State: the bytes of an
    incomplete frame."""

    def __init__(self, kind: type[M], limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._kind: type[M] = kind
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that are complete now. Raises InvalidRequest for a malformed frame."""
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
            del rest[:end]  # cheap: a bytearray only moves its start
            try:
                message = self._kind.FromString(body)
            except DecodeError:
                name = self._kind.DESCRIPTOR.name
                raise InvalidRequest(f"the frame is not a {name}", field="frame") from None
            yield message
