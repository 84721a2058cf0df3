"""KV on the link's own TCP connection. Pages are sent and received without a copy in user
space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_transfer.cache.host_memory import EndedCopy
from kv_transfer.protocol.link import ConsumerChannel, ProducerChannel
from kv_transfer.protocol.messages import encode
from kv_transfer.protocol.transport import Transport, source_of, target_of

if TYPE_CHECKING:
    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.protocol.transport import LocalKv

_DISCARD_BYTES = 1 << 20


class TcpProducer(ProducerChannel):
    name = "tcp"

    def __init__(self, local: LocalKv, link: Link) -> None:
        self._regions = local.regions
        self._stream = link.stream

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        pages = source_of(self._regions, part).pages(block_ids)
        self._stream.write_pieces([memoryview(encode(chunk)), *pages])
        return EndedCopy(b"")


class TcpConsumer(ConsumerChannel):
    name = "tcp"

    def __init__(self, local: LocalKv, link: Link) -> None:
        self._regions = local.regions
        self._stream = link.stream

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        if block_ids is None or part is None:
            rest, scratch = chunk.size, memoryview(bytearray(min(chunk.size, _DISCARD_BYTES)))
            while rest:
                self._stream.fill([scratch[:rest]])
                rest -= len(scratch[:rest])
            return EndedCopy(b"")
        region = target_of(self._regions, part)
        self._stream.fill(region.pages(block_ids))
        return EndedCopy(region.digests(block_ids))


class TcpTransport(Transport):
    """Transport between any two hosts."""

    name = "tcp"

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        return {} if local.is_host else None

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        return TcpConsumer(local, link), {}

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        return TcpProducer(local, link)
