"""Bytes on the link itself, gathered from and scattered to the paged cache without staging.

`sendmsg` and `recvmsg_into` take the pages as I/O vectors: no copy in user space on either side.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from kv_transfer.errors import LinkClosed
from kv_transfer.messages import Chunk, encode
from kv_transfer.transport.by_token import taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.layout import PagePart
    from kv_transfer.transport.base import LocalKv, SourceChannel, TargetChannel, Wire

_IOV_MAX = 512
_DISCARD_BYTES = 1 << 20
# A chunk of so many bytes is sent as far as the peer's buffer takes it, and the rest later, from a
# copy: then any thread may push it.
UNWAITED_BYTES = 1 << 20


def send_all(sock: socket.socket, pages: Sequence[memoryview]) -> None:
    """Sends the pages in order; returns when the kernel has every byte."""
    rest = list(pages)
    at = 0
    while at < len(rest):
        try:
            sent = sock.sendmsg(rest[at : at + _IOV_MAX])
        except BlockingIOError as error:
            raise LinkClosed("the peer reads nothing") from error
        at = _advance(rest, at, sent)


def send_some(sock: socket.socket, pages: Sequence[memoryview]) -> list[memoryview]:
    """Sends what goes without waiting; returns the pages, and the part of one, that did not."""
    rest = list(pages)
    try:
        sent = sock.sendmsg(rest[:_IOV_MAX], [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return rest
    return rest[_advance(rest, 0, sent) :]


def receive_all(wire: Wire, pages: Sequence[memoryview]) -> None:
    """Fills the pages in order."""
    rest, sock = list(pages), wire.sock
    at = 0
    while at < len(rest) and (got := wire.take_ahead(rest[at])):
        at = _advance(rest, at, got)
    while at < len(rest):
        # MSG_WAITALL: else a call, with all its vectors, would bring only what is there already.
        got = sock.recvmsg_into(rest[at : at + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
        if not got:
            raise LinkClosed("the peer closed the link inside a chunk")
        at = _advance(rest, at, got)


def _advance(pages: list[memoryview], at: int, count: int) -> int:
    while count:
        size = pages[at].nbytes
        if count < size:
            pages[at] = pages[at][count:]
            return at
        count -= size
        at += 1
    return at


class TcpSource:
    """Sends a chunk in one piece with its message."""

    name = "tcp"
    unwaited_bytes = UNWAITED_BYTES
    makes_digests = False

    def __init__(self, local: LocalKv, wire: Wire) -> None:
        self._region = local.region
        self._wire = wire

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        region = self._region
        if chunk.tokens:
            chunk, data = taken(region, chunk, source_ids, part, skip)
            pages = [memoryview(encode(chunk)), data]
        else:
            if part is not None:
                region = region.narrowed(part.source_start, part.size)
            pages = [memoryview(encode(chunk)), *region.pages(source_ids)]
        if chunk.bytes > UNWAITED_BYTES:
            send_all(self._wire.sock, pages)
        elif rest := send_some(self._wire.sock, pages):
            self._wire.send(b"".join(rest))

    def close(self) -> None:
        pass


class _TcpTarget:
    name = "tcp"

    def __init__(self, local: LocalKv, wire: Wire) -> None:
        self._region = local.region
        self._wire = wire

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        if block_ids is None:
            self._discard(chunk.bytes)
        else:
            region = self._region
            if part is not None:
                region = region.narrowed(part.target_start, part.size)
            if not chunk.tokens:
                receive_all(self._wire, region.pages(block_ids))
                return
            data = memoryview(bytearray(chunk.bytes))
            receive_all(self._wire, [data])
            region.put(block_ids, chunk.tokens, data)

    def _discard(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, _DISCARD_BYTES)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self._wire.receive_into(piece)
            count -= len(piece)

    def idle(self) -> bool:
        # Only our own reader thread writes, and it is gone when the link is down.
        return True

    def close(self) -> None:
        pass


class TcpTransport:
    """Works between any two hosts."""

    name = "tcp"
    lost_slots = 0

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        return {"transport": self.name} if local.region.is_host else None

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        return _TcpTarget(local, wire)

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        return TcpSource(local, wire)

    def close(self) -> None:
        pass
