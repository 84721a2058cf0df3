"""What every transport promises.

Control messages travel on the link; a transport decides how the bytes of a chunk travel. It sends
them to the consumer (TCP, NCCL), or exports the producer's cache so that the consumer copies from
it (mapped memory). In both cases only the consumer writes into its own blocks.

Handshake: the producer makes an `offer`; the consumer opens its end of the first offer that it can
use, or raises TransportUnavailable; the details it returns open the producer's end.

Errors: OSError and KvTransferError end the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_transfer.layout import PagePart
    from kv_transfer.memory import KvRegion, SharedMemory
    from kv_transfer.protocol.link import ConsumerChannel, Link, ProducerChannel


class TransportUnavailable(KvTransferError):
    """The two workers cannot use this transport; the next one is tried."""


@dataclass(frozen=True, slots=True)
class LocalKv:
    """This worker's KV cache: a region for each group, over one memory. `shared` is None if it does
    not lie in shared memory."""

    regions: tuple[KvRegion, ...]
    shared: SharedMemory | None

    @property
    def is_host(self) -> bool:
        return self.regions[0].is_host

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block."""
        return max(region.geometry.block_bytes for region in self.regions)


def source_of(regions: Sequence[KvRegion], part: PagePart) -> KvRegion:
    """Return what is read of a producer's cache."""
    return regions[part.group].narrowed(part.source_start, part.size)


def target_of(regions: Sequence[KvRegion], part: PagePart) -> KvRegion:
    """Return what is written of a consumer's cache."""
    return regions[part.group].narrowed(part.target_start, part.size)


@dataclass(frozen=True, slots=True)
class Account:
    """What a transport holds beside the KV cache, and its counts by name. `lost_slots` are staging
    slots that may still be written to and are not used again."""

    held_bytes: int = 0
    lost_slots: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)


class Transport:
    """One way to move bytes."""

    name: str

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        """Producer: return what the consumer needs, or None if this cache cannot be sent so."""
        raise NotImplementedError

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        """Consumer: open its end; return it and the details for the producer."""
        raise NotImplementedError

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        """Producer: open its end."""
        raise NotImplementedError

    def account(self) -> Account:
        return Account()

    def close(self) -> None:
        """Release what the channels share, when no link is left. Idempotent."""
