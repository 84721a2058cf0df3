"""Content of vLLM's prefix cache, from its KV events. Tested with vLLM 0.32.0.

The scheduler passes the events of a step to its `kv_event_publisher`, which `CacheEvents` replaces.
Two blocks can hold the same tokens. vLLM reports `BlockRemoved` for the first one evicted, although
the other is still usable. A removed block is therefore looked up in the block pool first.

Used: vllm/distributed/kv_events.py (EventPublisher, the events), vllm/v1/core/sched/scheduler.py
(`kv_event_publisher`, `kv_cache_manager`), vllm/v1/core/block_pool.py (`get_cached_block`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from workers.cache.mirror import CacheMirror

if TYPE_CHECKING:
    from pdserve.model.prefix_hash import MediaKey
    from workers.engine import CacheChange

_log = logging.getLogger(__name__)


def events_config(*, enabled: bool) -> KVEventsConfig:
    """Return engine arguments that enable or disable events, without a publisher of vLLM."""
    return KVEventsConfig(enable_kv_cache_events=enabled, publisher="null")


class CacheEvents(EventPublisher):  # type: ignore[misc]
    """Collector of KV events. State: events since the last `take`, and the mirror they update."""

    def __init__(self, mirror: CacheMirror, block_pool: Any, block_size: int) -> None:
        super().__init__()
        self._mirror = mirror
        self._pool = block_pool
        self._block_size = block_size
        self._events: list[Any] = []

    def publish(self, events: EventBatch) -> None:
        self._events += events.events

    def shutdown(self) -> None:
        """Do nothing: no resource is open. Required by the interface."""

    def take(self) -> CacheChange | None:
        """Return the change of the cache since the last call, or None."""
        if not self._events:
            return None
        events, self._events = self._events, []
        # Host memory first, because blocks that this batch evicts from the cache still have their
        # hash.
        for event in events:
            if getattr(event, "medium", None) == MEDIUM_CPU:
                stored = isinstance(event, BlockStored)
                change = self._mirror.store_in_tier if stored else self._mirror.remove_from_tier
                for key in event.block_hashes:
                    change(key)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._mirror.clear()
            elif isinstance(event, BlockRemoved) and event.medium == self._pool.medium:
                self._remove(event)
            elif isinstance(event, BlockStored) and (inputs := self._inputs_of(event)) is not None:
                self._mirror.store(
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.lora_name or "",
                    *inputs,
                )
        return self._mirror.take() or None

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            if key in self._mirror and self._pool.get_cached_block(key, [0]) is None:
                self._mirror.remove(key)

    def _inputs_of(self, event: BlockStored) -> tuple[str, dict[int, list[MediaKey]]] | None:
        """Return (cache salt of the blocks or "", images in each block). Return None if these,
        tokens and adapter do not identify the blocks.

        `extra_keys` are the other inputs of vLLM's block hashes: adapter name, (image hash, offset)
        pairs, the salt in the first block of a prompt, and digests of embeddings, which are bytes.
        """
        if event.medium != self._pool.medium or event.block_size != self._block_size:
            return None
        salt = ""
        media: dict[int, list[MediaKey]] = {}
        adapter = () if event.lora_name is None else (event.lora_name,)
        for index, extra in enumerate(event.extra_keys or [None] * len(event.block_hashes)):
            keys = list(extra or ())
            if tuple(keys[: len(adapter)]) != adapter:
                return None
            others = keys[len(adapter) :]
            while others and isinstance(others[0], tuple):
                media.setdefault(index, []).append(others.pop(0))
            if others and index == 0 and event.parent_block_hash is None:
                salt = others.pop(0)
            if others or not isinstance(salt, str):
                return None
        return salt, media


def watch(scheduler: Any, config: Any, model: str) -> CacheEvents | None:
    """Subscribe to the events of this scheduler.

    Return None if tokens alone do not identify its blocks (sliding windows, hybrid models). With
    some drafts (EAGLE, MTP) vLLM uses one block less than it has cached.
    """
    if not scheduler.enable_kv_cache_events:
        return None
    size = int(config.cache_config.block_size)
    groups = scheduler.kv_cache_config.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec if len(groups) == 1 else None
    if (
        type(spec) not in (FullAttentionSpec, MLAAttentionSpec)
        or spec.sliding_window is not None
        or spec.block_size != size
    ):
        _log.info("the prefix cache of this model is not reported to routers")
        return None
    events = CacheEvents(CacheMirror(model, size), scheduler.kv_cache_manager.block_pool, size)
    scheduler.kv_event_publisher = events
    return events
