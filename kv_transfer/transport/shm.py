"""Between processes of one host: the source maps the target's KV cache and copies pages straight
into it.

Only the granted blocks are written, each copy under a WriteFence, so a target that gave up knows
when its memory is its own again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kv_transfer.digest import DIGEST_DUE, NO_DIGEST
from kv_transfer.errors import LinkClosed, UnsupportedLayout
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion, PeerMemory, WriteFence, boot_id, parts_of
from kv_transfer.messages import Chunk, encode
from kv_transfer.transport.base import (
    LocalKv,
    SourceChannel,
    TargetChannel,
    TransportUnavailable,
    Wire,
)
from kv_transfer.transport.by_token import placed, taken

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.tokens import TokenOrder

_MAX_SLOT = 1 << 62


def _order(local: KvRegion, block_size: int, geometry: KvGeometry) -> TokenOrder | None:
    """How the target's pages hold their tokens. Raises ValueError and UnsupportedLayout."""
    ours = local.order
    if ours is None or not block_size:
        return None
    token_bytes = ours.content * ours.item_bytes
    if block_size < 0 or geometry.page_bytes % (block_size * token_bytes):
        raise ValueError(f"blocks of {block_size} tokens in pages of {geometry.page_bytes} bytes")
    return ours.resized(block_size)


class ShmSource:
    """Copies into the target's memory. Nothing in it waits for the target."""

    name = "shm"
    unwaited_bytes = sys.maxsize
    makes_digests = True

    def __init__(self, local: KvRegion, peer: PeerMemory, slot: int, wire: Wire) -> None:
        self._local = local
        self._peer = peer
        self._fence = WriteFence(peer.fd, slot)
        self._wire = wire

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        if not self._fence.enter():
            raise LinkClosed("the target has taken its memory back")
        try:
            if chunk.tokens:
                chunk, data = taken(self._local, chunk, source_ids, part, skip)
                placed(self._peer.region, self._local, part).put(target_ids, chunk.tokens, data)
                mark = NO_DIGEST
            else:
                peer, local = parts_of(self._peer.region, self._local, part)
                mark = peer.copy_from(local, source_ids, target_ids, chunk.digest == DIGEST_DUE)
        finally:
            self._fence.leave()
        if mark != NO_DIGEST:
            chunk = Chunk(chunk.transfer_id, chunk.first, chunk.count, chunk.bytes, mark)
        self._wire.send(encode(chunk))

    def close(self) -> None:
        self._peer.close()


class ShmTarget:
    """The receiving end: the bytes are in place before their message comes."""

    name = "shm"

    def __init__(self, fence: WriteFence) -> None:
        self._fence = fence

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        return

    def idle(self) -> bool:
        return self._fence.seal()

    def close(self) -> None:
        pass


class ShmTransport:
    """Works between processes of one user on one running kernel."""

    name = "shm"
    lost_slots = 0

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        if local.shared is None:
            return None
        return {
            "transport": self.name,
            "boot_id": boot_id(),
            "path": local.shared.path,
            "inode": local.shared.inode,
            "size": local.shared.size,
            "geometry": local.region.geometry.to_list(),
            "block_size": local.region.block_size,
            "slot": slot,
        }

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        if local.shared is None:
            raise TransportUnavailable("the KV cache is not in shared memory")
        return ShmTarget(WriteFence(local.shared.fd, slot))

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        if offer.get("boot_id") != boot_id():
            raise TransportUnavailable("the workers run on different hosts")
        ours = local.region.geometry
        try:
            slot, inode, size = (int(offer[key]) for key in ("slot", "inode", "size"))
            geometry = KvGeometry.from_list(list(offer["geometry"]))
            if not 0 <= slot < _MAX_SLOT:
                raise ValueError("no such slot")
            if geometry.num_layers != ours.num_layers:
                raise ValueError(f"{geometry.num_layers} layers, not {ours.num_layers}")
            order = _order(local.region, int(offer["block_size"]), geometry)
            peer = PeerMemory(str(offer["path"]), inode, size, geometry, order)
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            OSError,
            UnsupportedLayout,
        ) as error:
            raise TransportUnavailable(f"cannot map the target's memory: {error}") from error
        return ShmSource(local.region, peer, slot, wire)

    def close(self) -> None:
        pass
