"""Transfers of image features, the output of a model's image encoder, with the protocol of KV.

A worker has a pool of blocks in host memory beside its KV cache. The producer and the consumer of
KV treat the pool as a cache of one layer group, with bytes in place of tokens. So image features
have the digests, holds, transports and authentication of KV. A transfer ends with the size of the
features in place of sampled tokens.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kv_transfer import transport
from kv_transfer.cache.geometry import KvGeometry, KvGroup, compatibility
from kv_transfer.cache.host_memory import KvRegion, SharedMemory
from kv_transfer.protocol.consumer import ReceiveFailed
from kv_transfer.protocol.messages import Cancel, GroupBlocks, Send, Subscribe
from kv_transfer.protocol.peers import Peers
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.protocol.snapshot import take
from kv_transfer.protocol.transport import LocalKv
from kv_transfer.settings import AUTO, ON_HOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kv_transfer.protocol.link import Link
    from kv_transfer.protocol.producer import Action
    from kv_transfer.protocol.snapshot import KvSnapshot
    from kv_transfer.settings import ConnectorConfig

BLOCK_BYTES = 64 << 10
_PLAN = CopyPlan((Shard(1, BLOCK_BYTES, KvGroup(0, BLOCK_BYTES), (1,)),))


@dataclass(frozen=True, slots=True)
class ImageFeatureSource:
    """Where a prefill worker fetches the features of a request's images. `row_bytes`: size of the
    features of one token. The transfer of image `n` is `{transfer_id}/{n}`."""

    transfer_id: str
    address: str
    instance_id: str
    row_bytes: int

    def transfer_of(self, index: int) -> str:
        return f"{self.transfer_id}/{index}"


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The features of an image have arrived, and keep their blocks until `take` or `drop`. With a
    `reason`, they will not arrive."""

    transfer_id: str
    reason: str = ""


class ImageFeaturePool:
    """Blocks in shared memory. State: the free blocks, changed under a lock. Released by `close`,
    after the last copy."""

    def __init__(self, size_bytes: int) -> None:
        blocks = max(1, size_bytes // BLOCK_BYTES)
        size = blocks * BLOCK_BYTES
        self._memory = SharedMemory("pdserve-image-features")
        self._memory.grow(size)
        self._map = mmap.mmap(self._memory.fd, size)
        address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        geometry = KvGeometry(1, blocks, BLOCK_BYTES, size, BLOCK_BYTES)
        self._region = KvRegion(address, size, geometry)
        self.local = LocalKv({0: self._region}, self._memory)
        self._lock = threading.Lock()
        self._free = list(range(blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, size: int) -> list[int] | None:
        """Return blocks for `size` bytes, or None if too few are free."""
        count = -(-size // BLOCK_BYTES)
        with self._lock:
            if not 0 < count <= len(self._free):
                return None
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            self._free += block_ids

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        for at, page in enumerate(self._region.pages(block_ids)):
            part = data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
            page[: len(part)] = part

    def read(self, block_ids: Sequence[int], size: int) -> bytearray:
        data = bytearray().join(self._region.pages(block_ids))
        del data[size:]
        return data

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self._map.close()
        self._memory.close()


class ImageFeaturePlane:
    """The image features that one worker offers and fetches. Used by one thread. Released by
    `close`."""

    def __init__(
        self,
        settings: ConnectorConfig,
        instance_id: str,
        layout: Mapping[str, str],
        size_bytes: int,
    ) -> None:
        """`layout` identifies the format of the bytes: only planes with equal layouts exchange
        features. `size_bytes`: of the pool."""
        on_host = tuple(x for x in settings.transports if x in ON_HOST)
        settings = replace(settings, transports=on_host or (AUTO,))
        self.layout = {**layout, **settings.shared_by_peers}
        self.compatibility = compatibility(self.layout)
        self._transports = transport.make(settings)
        self._pool = ImageFeaturePool(size_bytes)
        self._peers = Peers(
            settings,
            instance_id,
            self._transports,
            local=self._pool.local,
            compatibility=self.compatibility,
            plan=_PLAN,
        )
        # Block ids and size by transfer id. A transfer keeps its blocks until it has ended.
        self._offered: dict[str, list[int]] = {}
        self._fetching: dict[str, tuple[list[int], int]] = {}
        self._arrived: dict[str, tuple[list[int], int]] = {}

    @property
    def address(self) -> str:
        return self._peers.address

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._peers.transports)

    @property
    def free_blocks(self) -> int:
        return self._pool.free_blocks

    def snapshot(self) -> KvSnapshot:
        """Return the state of all transfers. May be called on any thread."""
        return take(self._peers)

    # -- producer

    def offer(self, transfer_id: str, data: memoryview) -> bool:
        """Hold features for the consumer that presents `transfer_id`, until it has them or the hold
        ends. If the pool is full, notify the consumer and return False."""
        self.collect()
        block_ids = self._pool.allocate(len(data))
        if block_ids is None:
            self.refuse(transfer_id)
            return False
        self._pool.write(block_ids, data)
        self._offered[transfer_id] = block_ids

        def decide(now: float) -> Iterator[Action[Link]]:
            producer = self._peers.driver.producer
            yield from producer.expect(transfer_id, transfer_id, now)
            yield from producer.progress(transfer_id, [block_ids], len(data), now)
            yield from producer.end(transfer_id, (len(data),), now, held=True)

        self._peers.driver.drive(decide)
        return True

    def refuse(self, transfer_id: str) -> None:
        """Notify the consumer that presents `transfer_id` that no features will follow."""

        def decide(now: float) -> Iterator[Action[Link]]:
            producer = self._peers.driver.producer
            yield from producer.expect(transfer_id, transfer_id, now)
            yield from producer.end(transfer_id, (), now, held=False)

        self._peers.driver.drive(decide)

    # -- consumer

    def fetch(self, source: ImageFeatureSource, index: int, rows: int) -> bool:
        """Start to fetch the features of image `index`, of `rows` tokens. Return False if the pool
        is full."""
        transfer_id, size = source.transfer_of(index), rows * source.row_bytes
        block_ids = self._pool.allocate(size)
        if block_ids is None:
            return False
        self._fetching[transfer_id] = block_ids, size
        ranks = _PLAN.ranks_of(1, ())
        (read,) = _PLAN.reads(ranks, (transfer_id, source.instance_id))
        (group,) = read.groups
        blocks = GroupBlocks(0, 0, block_ids, list(group.heads), list(group.layers))
        subscription = Subscribe(transfer_id, size, [blocks], read.readers)

        def decide(now: float) -> Iterator[Action[Link]]:
            link = self._peers.link_to(source.address, source.instance_id)
            consumer = self._peers.driver.consumer
            yield from consumer.subscribe(transfer_id, [(link, subscription, [group.part])], now)

        self._peers.driver.drive(decide)
        return True

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Stop fetching. `collect` returns the failure once all copies have ended."""
        self._peers.driver.drive(lambda _: self._peers.driver.consumer.cancel(transfer_id, reason))

    def decline(self, source: ImageFeatureSource, index: int) -> None:
        """Notify the producer that these features will not be fetched."""

        def decide(_: float) -> Iterator[Action[Link]]:
            link = self._peers.link_to(source.address, source.instance_id)
            yield Send(link, Cancel(source.transfer_of(index)))

        self._peers.driver.drive(decide)

    def collect(self) -> list[FetchEnded]:
        """Return the fetches that ended since the last call. Free the blocks of ended offers and of
        failed fetches."""
        ended, outcomes = self._peers.driver.take_results()
        for transfer_id in ended:
            self._pool.free(self._offered.pop(transfer_id, ()))
        found = []
        for outcome in outcomes:
            transfer_id = outcome.request_id
            block_ids, size = self._fetching.pop(transfer_id)
            reason = ""
            if isinstance(outcome, ReceiveFailed):
                reason = outcome.reason or outcome.code  # a peer may send no reason
            elif outcome.token_ids != (size,):
                reason = f"the features have {outcome.token_ids[0]} bytes, not {size}"
            if reason:
                self._pool.free(block_ids)
            else:
                self._arrived[transfer_id] = block_ids, size
            found.append(FetchEnded(transfer_id, reason))
        return found

    def take(self, transfer_id: str) -> bytearray:
        """Return features that have arrived, row after row. Free their blocks."""
        block_ids, size = self._arrived.pop(transfer_id)
        data = self._pool.read(block_ids, size)
        self._pool.free(block_ids)
        return data

    def drop(self, transfer_id: str) -> None:
        """Free the blocks of features that have arrived."""
        block_ids, _ = self._arrived.pop(transfer_id)
        self._pool.free(block_ids)

    def close(self) -> None:
        """End all transfers. Idempotent."""
        self._peers.close()
        for each in self._transports:
            each.close()
        self._pool.close()
