"""Bytes on the link itself, gathered from and scattered to the paged cache without staging.

The pages are the vectors of the socket's calls (kv_transfer/scattering.py): no copy in user space
on either side.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from kv_transfer.messages import Chunk, encode
from kv_transfer.scattering import left, receive_all, receive_pages, send_pages, send_pieces
from kv_transfer.transport.by_token import taken

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.transport.base import LocalKv, SourceChannel, TargetChannel, Wire

_DISCARD_BYTES = 1 << 20
# A chunk of so many bytes is sent as far as the peer's buffer takes it, and the rest later, from a
# copy: then any thread may push it.
UNWAITED_BYTES = 1 << 20


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
        region, wire = self._region, self._wire
        # The end of it goes in one piece with what follows, so that the peer is woken once. Should
        # nothing follow after all, the kernel sends it after a moment.
        flags = socket.MSG_MORE if wire.has_more() else 0
        if chunk.bytes <= UNWAITED_BYTES:
            flags |= socket.MSG_DONTWAIT
        if chunk.tokens:
            chunk, data = taken(region, chunk, source_ids, part, skip)
            head = encode(chunk)
            sent = send_pieces(wire.sock, [memoryview(head), data], flags)
            pages = [data]
        else:
            if part is not None:
                region = region.narrowed(part.source_start, part.size)
            head = encode(chunk)
            sent = send_pages(wire.sock, head, region, source_ids, flags)
            pages = region.pages(source_ids) if sent < len(head) + chunk.bytes else []
        if pages:
            wire.send(left([memoryview(head), *pages], sent))

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
                receive_pages(self._wire, region, block_ids)
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
