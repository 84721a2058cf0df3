"""What a worker's prefix cache holds, for the routers that watch it.

A watcher gets a snapshot, in parts, and then the changes since the last update it was sent. One
that falls too far behind gets a new snapshot.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Unavailable
from pdserve.prefix_hash import pack
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from workers.engine import CacheChange

MAX_WATCHERS = 64
MAX_PENDING = 1 << 17
_PART = 1 << 12  # blocks; a router takes half a millisecond to read them


class CacheWatcher:
    """One router's view. State: what it was not sent yet of a snapshot and of later changes."""

    def __init__(self, feed: CacheFeed, router_id: str, *, max_pending: int) -> None:
        self.router_id = router_id
        self._feed = feed
        self._max_pending = max_pending
        self._pending: dict[int, bool] = {}  # stored (True) or removed, parents before children
        self._snapshot: list[int] | None = None
        self._sent = 0
        self._sequence = 0
        self._due = asyncio.Event()
        self._closed: PdserveError | None = None
        self._begin()

    def _begin(self) -> None:
        self._pending.clear()
        self._snapshot, self._sent = list(self._feed.blocks), 0
        self._due.set()

    def changed(self, change: CacheChange) -> None:
        pending = self._pending
        for is_stored, blocks in ((False, change.removed), (True, change.stored)):
            for block in blocks:
                pending.pop(block, None)
                pending[block] = is_stored
        if len(pending) > self._max_pending:
            self._begin()
        self._due.set()

    def close(self, error: PdserveError) -> None:
        """Make `next_update` raise `error`."""
        self._closed = self._closed or error
        self._due.set()

    async def next_update(self) -> w.CacheUpdate:
        """Wait for the next update. Raises the error that the watch was closed with."""
        await self._due.wait()
        if self._closed is not None:
            raise self._closed
        self._sequence += 1
        update = w.CacheUpdate(sequence=self._sequence)
        if self._snapshot is not None:
            update.reset = self._sent == 0
            update.stored = pack(self._snapshot[self._sent : self._sent + _PART])
            self._sent += _PART
            update.more = self._sent < len(self._snapshot)
            if not update.more:
                self._snapshot = None
        else:
            pending, self._pending = self._pending, {}
            update.removed = pack(x for x, is_stored in pending.items() if not is_stored)
            update.stored = pack(x for x, is_stored in pending.items() if is_stored)
        if self._snapshot is None and not self._pending:
            self._due.clear()
        return update


class CacheFeed:
    """State: the cached blocks, each after its parent, and the watchers by router."""

    def __init__(self, *, max_watchers: int = MAX_WATCHERS, max_pending: int = MAX_PENDING) -> None:
        self.blocks: dict[int, None] = {}
        self._watchers: dict[str, CacheWatcher] = {}
        self._max_watchers = max_watchers
        self._max_pending = max_pending

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def changed(self, change: CacheChange) -> None:
        """The engine's cache has changed."""
        for block in change.removed:
            self.blocks.pop(block, None)
        self.blocks.update(dict.fromkeys(change.stored))
        for watcher in self._watchers.values():
            watcher.changed(change)

    def watch(self, router_id: str) -> CacheWatcher:
        """Return a watcher for `leave`. An older one of the same router is closed. Raises
        Overloaded if there are too many."""
        older = self._watchers.pop(router_id, None)
        if older is not None:
            older.close(Unavailable(f"router {router_id} opened another watch"))
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(f"{self._max_watchers} routers watch this worker's cache already")
        watcher = CacheWatcher(self, router_id, max_pending=self._max_pending)
        self._watchers[router_id] = watcher
        return watcher

    def leave(self, watcher: CacheWatcher) -> None:
        """End a watch. Idempotent."""
        if self._watchers.get(watcher.router_id) is watcher:
            del self._watchers[watcher.router_id]

    def close(self) -> None:
        """Close every watch."""
        for watcher in self._watchers.values():
            watcher.close(Unavailable("this worker is closing"))
