"""Frames over a connection of their own, beside the gRPC stream that they belong to.

gRPC costs a router several times what reading a frame does (benchmarks/NOTES.md), and nothing comes
as often. So a worker without TLS offers, in the initial metadata of Attach, a port and a token that
is good once. The router connects there and shows the token; from then on the worker sends each
StepFrame behind its size, 4 bytes, big-endian, and the router sends nothing. Commands stay on the
gRPC stream, and so does the reason why the two end: where one ends the other does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from pdserve.errors import InvalidRequest
from pdserve.rpc import MAX_MESSAGE_BYTES
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TOKEN_BYTES = 32
_PORT_KEY, _TOKEN_KEY = "pdserve-frames-port", "pdserve-frames-token-bin"
_SIZE = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the frames of one stream can be had, and what to show there."""

    port: int
    token: bytes = field(repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ((_PORT_KEY, str(self.port)), (_TOKEN_KEY, self.token))


def offer_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> Offer | None:
    """The offer of a worker, or None where it made none. Raises InvalidRequest for half of one."""
    found = {key: value for key, value in metadata or () if key in (_PORT_KEY, _TOKEN_KEY)}
    if not found:
        return None
    port, token = found.get(_PORT_KEY, ""), found.get(_TOKEN_KEY, b"")
    if not isinstance(port, str) or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise InvalidRequest(f"must be a port, not {port!r}", field=_PORT_KEY)
    if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
        raise InvalidRequest(f"must be {TOKEN_BYTES} bytes", field=_TOKEN_KEY)
    return Offer(int(port), token)


def pack(frame: w.StepFrame) -> bytes:
    """The bytes that carry `frame`. Raises ValueError for one that no router would take."""
    body = frame.SerializeToString()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes")
    return _SIZE.pack(len(body)) + body


class FrameParser:
    """State: the bytes of a frame that has not come whole; at most the largest frame and what was
    fed last."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[w.StepFrame]:
        """The frames that have come whole. Raises InvalidRequest for what is none."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        while len(data) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(data, at)
            if size > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"a frame of {size} bytes is too large", field="frame")
            end = at + _SIZE.size + size
            if len(data) < end:
                break
            try:
                frame = w.StepFrame.FromString(data[at + _SIZE.size : end])
            except DecodeError:
                raise InvalidRequest("this is no frame", field="frame") from None
            at = end
            yield frame
        self._rest = data[at:]
