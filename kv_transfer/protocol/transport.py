"""The interface of all transports.

Control messages use the link; a transport moves the bytes of a chunk. It sends them to the consumer
(TCP, NCCL), or exports the producer's cache so that the consumer copies from it (mapped memory). In
both cases only the consumer writes into its own blocks, so it can reuse them after a failure
without an answer from the producer.

Handshake: the producer makes an `offer`. The consumer opens its end of the first offer that it can
use; others raise TransportUnavailable. The returned details open the producer's end.

Errors: OSError and KvTransferError end the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import KvRegion, SharedMemory
    from kv_transfer.protocol.link import ConsumerChannel, Link, ProducerChannel


class TransportUnavailable(KvTransferError):
    """The two workers cannot use this transport; the next one is tried."""


@dataclass(frozen=True, slots=True)
class LocalKv:
    """This rank's KV cache: one memory with a region for each group that has layers on this rank.
    `shared` is None if it is not shared memory."""

    regions: Mapping[int, KvRegion]
    shared: SharedMemory | None

    @property
    def memory(self) -> KvRegion:
        """Any of the regions, for properties of their common memory."""
        return next(iter(self.regions.values()))

    @property
    def is_host(self) -> bool:
        return self.memory.is_host

    @property
    def block_bytes(self) -> int:
        """Size of the largest block, in bytes."""
        return max(region.geometry.block_bytes for region in self.regions.values())


def source_of(regions: Mapping[int, KvRegion], part: PagePart) -> KvRegion:
    """Return the region of a producer's cache to read. Raises KvTransferError if the cache lacks
    it."""
    region = _region_of(regions, part.group)
    return region.narrowed(part.source_layers, part.source_start, part.size)


def target_of(regions: Mapping[int, KvRegion], part: PagePart) -> KvRegion:
    """Return the region of a consumer's cache to write. Raises KvTransferError if the cache lacks
    it."""
    region = _region_of(regions, part.group)
    return region.narrowed(part.target_layers, part.target_start, part.size)


def _region_of(regions: Mapping[int, KvRegion], group: int) -> KvRegion:
    if group not in regions:
        raise KvTransferError(f"no layers of group {group} are in this KV cache")
    return regions[group]


@dataclass(frozen=True, slots=True)
class TransportUsage:
    """Memory of a transport outside the KV cache, and its counters by name. `lost_slots` counts
    staging slots that are never reused, because the GPU may still write to them."""

    held_bytes: int = 0
    lost_slots: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)


class Transport:
    """One way to move bytes."""

    name: str

    def prepare(self, local: LocalKv) -> None:
        """Do what takes long and needs only the cache, before the engine's first step."""

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        """Producer: return the data that the consumer needs, or None if this transport cannot send
        this cache."""
        raise NotImplementedError

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        """Consumer: open its end; return it and the details for the producer."""
        raise NotImplementedError

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        """Producer: open its end."""
        raise NotImplementedError

    def usage(self) -> TransportUsage:
        return TransportUsage()

    def close(self) -> None:
        """Release resources shared by all channels, after the last link ended. Idempotent."""
