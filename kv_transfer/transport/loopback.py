"""For tests: both ends in one process, copies through a table of regions, and a hook that sees,
delays, changes or breaks each push."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_transfer.memory import parts_of
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
    from kv_transfer.memory import KvRegion

PushHook = Callable[[Chunk, list[int], list[int]], None]


class LoopbackTransport:
    """One instance serves both ends. `on_push` runs before each copy and may raise OSError."""

    name = "loopback"
    lost_slots = 0

    def __init__(self, on_push: PushHook | None = None) -> None:
        self.on_push = on_push
        self._regions: dict[int, KvRegion] = {}
        self._keys = itertools.count(1)

    def offer(self, local: LocalKv, slot: int) -> dict[str, Any] | None:
        key = next(self._keys)
        self._regions[key] = local.region
        return {"transport": self.name, "key": key}

    def target(self, local: LocalKv, slot: int, wire: Wire) -> TargetChannel:
        return _LoopbackTarget()

    def source(self, local: LocalKv, offer: dict[str, Any], wire: Wire) -> SourceChannel:
        key = offer.get("key")
        region = self._regions.get(key) if isinstance(key, int) else None
        if region is None:
            raise TransportUnavailable("the other end is not in this process")
        return _LoopbackSource(self, local.region, region, wire)

    def close(self) -> None:
        pass


class _LoopbackSource:
    name = "loopback"
    unwaited_bytes = 0  # a test may hold a push
    makes_digests = False

    def __init__(
        self, owner: LoopbackTransport, local: KvRegion, peer: KvRegion, wire: Wire
    ) -> None:
        self._owner = owner
        self._local = local
        self._peer = peer
        self._wire = wire

    def push(
        self,
        chunk: Chunk,
        source_ids: list[int],
        target_ids: list[int],
        part: PagePart | None = None,
        skip: int = 0,
    ) -> None:
        if self._owner.on_push is not None:
            self._owner.on_push(chunk, source_ids, target_ids)
        if chunk.tokens:
            chunk, data = taken(self._local, chunk, source_ids, part, skip)
            placed(self._peer, self._local, part).put(target_ids, chunk.tokens, data)
        else:
            peer, local = parts_of(self._peer, self._local, part)
            peer.copy_from(local, source_ids, target_ids)
        self._wire.send(encode(chunk))

    def close(self) -> None:
        pass


class _LoopbackTarget:
    name = "loopback"

    def receive(
        self, chunk: Chunk, block_ids: list[int] | None, part: PagePart | None = None
    ) -> None:
        return

    def idle(self) -> bool:
        return True

    def close(self) -> None:
        pass
