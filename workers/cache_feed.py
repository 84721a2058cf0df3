"""What a worker's prefix cache holds, for the routers that watch it.

Every watcher gets a snapshot, in parts, and then what changes: as one update, however many steps
were made since the last one was sent. One that falls too far behind gets a snapshot anew instead.
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
# A router takes a part of a snapshot in in half a millisecond, in which it does nothing else.
_PART = 1 << 12


class CacheWatcher:
    """One router's view. State: what it has not been sent of a snapshot and of the changes since,
    both bounded; why it was cut, once it was."""

    def __init__(self, feed: CacheFeed, router_id: str, *, max_pending: int) -> None:
        self.router_id = router_id
        self._feed = feed
        self._max_pending = max_pending
        self._pending: dict[int, bool] = {}
        self._snapshot: list[int] | None = None
        self._sent = 0
        self._sequence = 0
        self._due = asyncio.Event()
        self._cut_by: PdserveError | None = None
        self._begin()

    def _begin(self) -> None:
        self._pending.clear()
        self._snapshot, self._sent = list(self._feed.blocks), 0
        self._due.set()

    def changed(self, change: CacheChange) -> None:
        """Remember what the router is to be told."""
        pending = self._pending
        for chain_hash in change.removed:
            pending.pop(chain_hash, None)
            pending[chain_hash] = False
        for chain_hash in change.stored:
            # Behind all others: parents must stay before their children.
            pending.pop(chain_hash, None)
            pending[chain_hash] = True
        if len(pending) > self._max_pending:
            self._begin()
        self._due.set()

    def cut(self, error: PdserveError) -> None:
        """End the watch with `error`."""
        self._cut_by = self._cut_by or error
        self._due.set()

    async def next_update(self) -> w.CacheUpdate:
        """Waits until there is something to tell. Raises the error that the watch was cut with."""
        await self._due.wait()
        if self._cut_by is not None:
            raise self._cut_by
        self._sequence += 1
        update = w.CacheUpdate(sequence=self._sequence)
        if self._snapshot is not None:
            self._add_part(update, self._snapshot)
        else:
            pending, self._pending = self._pending, {}
            update.removed = pack(x for x, is_stored in pending.items() if not is_stored)
            update.stored = pack(x for x, is_stored in pending.items() if is_stored)
        if self._snapshot is None and not self._pending:
            self._due.clear()
        return update

    def _add_part(self, update: w.CacheUpdate, snapshot: list[int]) -> None:
        update.reset = self._sent == 0
        update.stored = pack(snapshot[self._sent : self._sent + _PART])
        self._sent += _PART
        if self._sent < len(snapshot):
            update.more = True
        else:
            self._snapshot = None


class CacheFeed:
    """State: the blocks that are cached, each behind its parent, and the watchers by router."""

    def __init__(self, *, max_watchers: int = MAX_WATCHERS, max_pending: int = MAX_PENDING) -> None:
        self.blocks: dict[int, None] = {}
        self._watchers: dict[str, CacheWatcher] = {}
        self._max_watchers = max_watchers
        self._max_pending = max_pending

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def changed(self, change: CacheChange) -> None:
        """The engine's cache changed."""
        for chain_hash in change.removed:
            self.blocks.pop(chain_hash, None)
        self.blocks.update(dict.fromkeys(change.stored))
        for watcher in self._watchers.values():
            watcher.changed(change)

    def watch(self, router_id: str) -> CacheWatcher:
        """A watcher, which `leave` ends. An older one of the same router is cut. Raises Overloaded
        where there are too many."""
        older = self._watchers.pop(router_id, None)
        if older is not None:
            older.cut(Unavailable(f"router {router_id} watches anew"))
        if len(self._watchers) >= self._max_watchers:
            raise Overloaded(f"{self._max_watchers} routers watch this worker's cache already")
        watcher = CacheWatcher(self, router_id, max_pending=self._max_pending)
        self._watchers[router_id] = watcher
        return watcher

    def leave(self, watcher: CacheWatcher) -> None:
        """The watch is over. Idempotent."""
        if self._watchers.get(watcher.router_id) is watcher:
            del self._watchers[watcher.router_id]

    def close(self) -> None:
        """Cut every watch."""
        for watcher in self._watchers.values():
            watcher.cut(Unavailable("this worker is closing"))
