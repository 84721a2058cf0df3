"""KV between processes of one host: the consumer maps the producer's cache and copies by itself.

No process writes into another's memory. If the producer reuses blocks while the consumer copies
them, it announces them again or ends the transfer; otherwise the digests do not match.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.host_memory import EndedCopy, PeerMemory
from kv_transfer.errors import KvTransferError, ProtocolError
from kv_transfer.protocol.link import ConsumerChannel, ProducerChannel
from kv_transfer.protocol.transport import Transport, TransportUnavailable, source_of, target_of
from kv_transfer.transport.descriptors import Descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy, KvRegion
    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.messages import ChunkReady
    from kv_transfer.protocol.transport import LocalKv
    from kv_transfer.settings import ConnectorConfig

logger = logging.getLogger(__name__)


class MappedProducer(ProducerChannel):
    is_quick = True

    def __init__(self, link: Link, name: str) -> None:
        self._stream = link.stream
        self.name = name

    def send(self, chunk: ChunkReady, block_ids: list[int], part: PagePart) -> BlockCopy:
        self._stream.buffer(replace(chunk, block_ids=block_ids))
        return EndedCopy(b"")


class PeerCache(Protocol):
    """A producer's KV cache, mapped into this process until `close`."""

    @property
    def regions(self) -> Mapping[int, KvRegion]: ...

    def close(self) -> None: ...


class MappedConsumer(ConsumerChannel):
    is_pull = True

    def __init__(self, local: LocalKv, peer: PeerCache, name: str) -> None:
        self._local = local
        self._peer = peer
        self.name = name

    def receive(
        self,
        chunk: ChunkReady,
        block_ids: list[int] | None,
        part: PagePart | None,
        checked: range | None = None,
    ) -> BlockCopy:
        if block_ids is None or part is None:
            return EndedCopy(b"")
        if len(chunk.block_ids) != len(block_ids):
            raise ProtocolError("a chunk of mapped memory without its blocks")
        peer = source_of(self._peer.regions, part)
        region = target_of(self._local.regions, part)
        return region.begin_copy(peer, chunk.block_ids, block_ids, checked)

    def close(self) -> None:
        self._peer.close()


class MappedTransport(Transport):
    """Transport between processes of one user on one host, also in different containers."""

    name = "shm"

    def __init__(self, settings: ConnectorConfig) -> None:
        self._descriptors = Descriptors(settings)

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        if local.shared is None:
            return None
        try:
            self._descriptors.share(local.shared.path)
        except KvTransferError as error:
            logger.warning("shm is not offered: %s", error)
            return None
        return {
            "socket": self._descriptors.name,
            "key": self._descriptors.key,
            "size": local.shared.size,
            "geometries": [[n, *each.geometry.to_list()] for n, each in local.regions.items()],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        if not local.is_host:
            raise TransportUnavailable("the KV cache is in GPU memory")
        try:
            # Stages of a pipeline may differ in their groups and layers.
            found = {
                int(group): KvGeometry.from_list(values) for group, *values in offer["geometries"]
            }
            key = offer["key"]
            if not isinstance(key, bytes):  # bytes(n) of a number would allocate n bytes
                raise TypeError("the key is not bytes")
            fd = self._descriptors.fetch(str(offer["socket"]), key)
            try:
                peer = PeerMemory(fd, int(offer["size"]), found)
            finally:
                os.close(fd)
        except (KeyError, TypeError, ValueError, OverflowError, OSError, KvTransferError) as error:
            raise TransportUnavailable(f"cannot map the producer's memory: {error}") from error
        return MappedConsumer(local, peer, self.name), {}

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        return MappedProducer(link, self.name)

    def close(self) -> None:
        self._descriptors.close()
