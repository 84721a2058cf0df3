"""Retention of sessions' KV blocks in vLLM (workers/cache/retention.py). Tested with vLLM 0.32.0.

vLLM's block pool takes blocks from the front of its queue of free blocks, and puts the cached ones
of a request that has ended at the back. `RetainingBlockQueue` replaces the queue and keeps retained
free blocks behind all others. vLLM still counts them as free, and nothing is pinned.

Used: vllm/v1/core/kv_cache_utils.py (FreeKVCacheBlockQueue, KVCacheBlock, resolve_block_hashes),
vllm/v1/core/block_pool.py (`free_block_queue`, `get_cached_block`), vllm/v1/core/sched/scheduler.py
(`kv_cache_manager`), vllm/v1/core/kv_cache_coordinator.py (`single_type_managers`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    resolve_block_hashes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from workers.cache.retention import RetainedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.request import Request

    from pdserve.config import SessionRetentionConfig

_log = logging.getLogger(__name__)
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


class RetainingBlockQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """Free blocks in two parts, the retained ones last, each part in order of eviction. State:
    `_boundary`, the first retained block, or the end of the list.
    """

    def __init__(self, pool: Any, retained: RetainedBlocks) -> None:
        """Take over the free blocks of `pool`."""
        super().__init__(pool.free_block_queue.get_all_free_blocks())
        self._blocks: Sequence[KVCacheBlock] = pool.blocks
        self._boundary: KVCacheBlock = self.fake_free_list_tail
        self.retained = retained

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        popped: list[KVCacheBlock] = super().popleft_n(n)
        # Blocks outside the list have no neighbours; the end of the list always has one.
        if self._boundary.prev_free_block is None:
            self._boundary = self.fake_free_list_head.next_free_block
        if self.retained.blocks:
            for block in popped:
                self.retained.evicted(block.block_id)
        return popped

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the list, because a request uses it from the cache."""
        self._unlink(block)
        if released := self.retained.used(block.block_id):
            self.release(released)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if not self.retained.blocks:
            super().append_n(blocks)
            return
        # Each of the sessions that share a prefix frees it.
        self._append_retained([x for x in blocks if x.block_id in self.retained])
        self._append_others([x for x in blocks if x.block_id not in self.retained])

    def retain(self, block_ids: Sequence[int], now: float, expected_s: float) -> None:
        """Retain the blocks of a turn that has ended, the deepest first."""
        released = self.retained.retain(block_ids, now, expected_s)
        self._append_retained(self._take(x for x in block_ids if x in self.retained))
        self.release(released)

    def release(self, block_ids: Iterable[int]) -> None:
        """Move blocks that are no longer retained to the end of the first part."""
        self._append_others(self._take(block_ids))

    def _take(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        """Remove and return the blocks that are in the list, that is, not used by a request."""
        found = [x for x in map(self._blocks.__getitem__, block_ids) if x.prev_free_block]
        for block in found:
            self._unlink(block)
        return found

    def _unlink(self, block: KVCacheBlock) -> None:
        if block is self._boundary:
            self._boundary = block.next_free_block
        super().remove(block)

    def _append_retained(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        if blocks and self._boundary is self.fake_free_list_tail:
            self._boundary = blocks[0]

    def _append_others(self, blocks: list[KVCacheBlock]) -> None:
        last, boundary = self._boundary.prev_free_block, self._boundary
        for block in blocks:
            last.next_free_block, block.prev_free_block = block, last
            last = block
        last.next_free_block, boundary.prev_free_block = boundary, last
        self.num_free_blocks += len(blocks)


class BlockRetention:
    """Retention in the block pool of one scheduler."""

    def __init__(self, scheduler: Any, config: SessionRetentionConfig) -> None:
        manager = scheduler.kv_cache_manager
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        total = self._pool.num_gpu_blocks - 1  # less the null block
        self.table = RetainedBlocks(int(config.share * total), config.max_s)
        self._queue = RetainingBlockQueue(self._pool, self.table)
        self._pool.free_block_queue = self._queue

    def expire(self) -> None:
        self._queue.release(self.table.expire(time.monotonic()))

    def forget(self) -> None:
        """End all retention, because the blocks have lost their content."""
        self._queue.release(self.table.expire(float("inf")))

    def retain(self, request: Request, expected_s: float) -> None:
        """Retain the cached blocks of an ended request, whether they are free yet or not."""
        size = max(group.block_size for group in self._groups)
        tokens = (request.num_tokens - 1) // size * size  # the last one has no KV
        found: list[int] = []
        for number, group in enumerate(self._groups):
            hashes = resolve_block_hashes(
                request.block_hashes, self._pool.hash_block_size, group.block_size
            )
            # Blocks outside of a window are useless to the next turn.
            first = group.get_num_skipped_tokens(tokens) // group.block_size
            found += [
                cached[0].block_id
                for index in range(len(hashes) - 1, first - 1, -1)
                if (cached := self._pool.get_cached_block(hashes[index], [number]))
            ]
        self._queue.retain(found, time.monotonic(), expected_s)


def watch(scheduler: Any, config: SessionRetentionConfig) -> BlockRetention | None:
    """Replace the queue of this scheduler's pool. Return None if retention is disabled, the cache
    keeps no prefixes, or it has layers with other state than attention and windows."""
    manager = scheduler.kv_cache_manager
    if not (config.share and config.max_s and manager.enable_caching):
        return None
    pools = {id(group.block_pool) for group in manager.coordinator.single_type_managers}
    specs = [type(group.kv_cache_spec) for group in scheduler.kv_cache_config.kv_cache_groups]
    if others := {x.__name__ for x in specs if x not in _SPECS}:
        _log.info("the KV cache of %s retains no blocks of sessions", ", ".join(sorted(others)))
        return None
    # vLLM has other pools for other caches.
    return BlockRetention(scheduler, config) if pools == {id(manager.block_pool)} else None
