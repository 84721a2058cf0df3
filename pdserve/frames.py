"""Frames and commands over a connection of their own, beside the gRPC stream that they belong to.

gRPC costs a router several times what reading a frame or writing a command does
(benchmarks/NOTES.md), and nothing comes or goes as often. So a worker without TLS offers, in the
initial metadata of Attach, a port and a token that is good once. The router connects there and
shows the token. From then on the worker sends each StepFrame, and the router each Command that it
would have written to the stream, behind its size: 4 bytes, big-endian. A worker that does not say
that it takes commands there gets them over the stream, as one does that offers nothing. The reason
why the two end stays with the stream: where one ends the other does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import DecodeError

from pdserve.errors import InvalidRequest
from pdserve.rpc import MAX_MESSAGE_BYTES
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TOKEN_BYTES = 32
_PORT_KEY, _TOKEN_KEY = "pdserve-frames-port", "pdserve-frames-token-bin"
_COMMANDS_KEY = "pdserve-frames-take-commands"
_SIZE = struct.Struct(">I")

M = TypeVar("M", w.StepFrame, w.Command)


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the frames of one stream can be had, what to show there, and whether its commands are
    taken there too."""

    port: int
    token: bytes = field(repr=False)
    takes_commands: bool = True

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        commands = ((_COMMANDS_KEY, "1"),) if self.takes_commands else ()
        return ((_PORT_KEY, str(self.port)), (_TOKEN_KEY, self.token), *commands)


def offer_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> Offer | None:
    """The offer of a worker, or None where it made none. Raises InvalidRequest for half of one."""
    keys = (_PORT_KEY, _TOKEN_KEY, _COMMANDS_KEY)
    found = {key: value for key, value in metadata or () if key in keys}
    if not found:
        return None
    port, token = found.get(_PORT_KEY, ""), found.get(_TOKEN_KEY, b"")
    if not isinstance(port, str) or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise InvalidRequest(f"must be a port, not {port!r}", field=_PORT_KEY)
    if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
        raise InvalidRequest(f"must be {TOKEN_BYTES} bytes", field=_TOKEN_KEY)
    return Offer(int(port), token, _COMMANDS_KEY in found)


def pack(message: w.StepFrame | w.Command) -> bytes:
    """The bytes that carry `message`. Raises ValueError for one that nobody would take."""
    body = message.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes")
    return _SIZE.pack(len(body)) + body


class MessageParser(Generic[M]):
    """State: the bytes of a message of `kind` that has not come whole; at most the largest one and
    what was fed last."""

    def __init__(self, kind: type[M]) -> None:
        self._kind: type[M] = kind
        self._rest = bytearray()
        self._lacks = 0  # bytes, until looking at the rest again pays

    def feed(self, data: bytes) -> Iterator[M]:
        """The messages that have come whole. Raises InvalidRequest for what is none."""
        if self._rest:
            self._rest += data
            self._lacks -= len(data)
            if self._lacks > 0:
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, end = 0, _SIZE.size
        while len(data) >= end:
            (size,) = _SIZE.unpack_from(data, at)
            if size > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"a message of {size} bytes is too large", field="frame")
            end += size
            if len(data) < end:
                break
            try:
                message = self._kind.FromString(data[at + _SIZE.size : end])
            except DecodeError:
                what = self._kind.DESCRIPTOR.name
                raise InvalidRequest(f"this is no {what}", field="frame") from None
            at, end = end, end + _SIZE.size
            yield message
        self._rest += data[at:]
        self._lacks = end - len(data)
