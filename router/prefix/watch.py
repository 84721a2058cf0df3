"""The watch of one worker's prefix cache, and those of all workers.

A worker's blocks are in the index from its snapshot until its watch breaks, for whatever reason: a
stream that ends, an update that is missing, a worker that is gone. Then they count no more, and a
new watch begins with a new snapshot. Each watch has a connection of its own, so that a snapshot
does not stand before tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc.aio

from pdserve import prefix_hash, rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.prefix.index import PrefixIndex
from router.prefix.lookup import IndexLookup

if TYPE_CHECKING:
    from router.member import Member
    from router.prefix.index import Holder

logger = logging.getLogger(__name__)

CacheCall = grpc.aio.UnaryStreamCall[w.WatchCacheRequest, w.CacheUpdate]


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Bounds of a watch. Updates of a worker come at most once in `interval_s`; one of which blocks
    were refused is read anew at most once in `reread_s`."""

    begin_timeout_s: float = 5.0
    interval_s: float = 0.1
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    reread_s: float = 30.0


class CacheWatches:
    """Owns the index, one task for each member that is watched, and one that cleans up behind those
    that left. State beside them: why watches ended, by reason."""

    def __init__(
        self,
        router_id: str,
        *,
        max_blocks: int,
        settings: WatchSettings | None = None,
        dialer: rpc.Dialer = rpc.PLAIN,
    ) -> None:
        self.router_id = router_id
        self.dialer = dialer
        self.index = PrefixIndex(max_blocks)
        self.lookup = IndexLookup(self.index)
        self.settings = settings or WatchSettings()
        self.resyncs: Counter[str] = Counter()
        self._watches: dict[Member, CacheWatch] = {}
        self._purger: asyncio.Task[None] | None = None

    @property
    def synced(self) -> int:
        """Members whose snapshot has come whole."""
        return sum(1 for watch in self._watches.values() if watch.is_synced)

    def open(self, member: Member) -> None:
        """Watch a member in the background until `close`."""
        watch = self._watches[member] = CacheWatch(member, self)
        watch.start()

    def close(self, member: Member) -> asyncio.Task[None]:
        """End a watch; returns the task to wait for."""
        return self._watches.pop(member).close()

    def join(self, member: Member) -> Holder:
        """A member's snapshot begins."""
        self.lookup.joined(member.info.model.name, member.info.block_size)
        return self.index.join(member.worker_id)

    def leave(self, member: Member, holder: Holder) -> None:
        """What the index knows of a member holds no more."""
        self.lookup.left(member.info.model.name, member.info.block_size)
        self.index.leave(holder)
        if self._purger is None or self._purger.done():
            self._purger = asyncio.create_task(self._purge(), name="prefix-purge")

    async def _purge(self) -> None:
        while self.index.needs_purge:
            self.index.purge()
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Waits for the clean-up; every member has been closed before."""
        if self._purger is not None:
            self._purger.cancel()
            await asyncio.wait([self._purger])


class CacheWatch:
    """One member's watch. Owns one task and one channel. State: the member's place in the index,
    while there is a snapshot, and the number of the last update."""

    def __init__(self, member: Member, watches: CacheWatches) -> None:
        self._member = member
        self._watches = watches
        self._settings = watches.settings
        self._holder: Holder | None = None
        self._sequence = 0
        self._is_whole = False
        self._began = 0.0
        self._task: asyncio.Task[None]

    @property
    def is_synced(self) -> bool:
        return self._is_whole and self._holder is not None and not self._holder.truncated

    def start(self) -> None:
        name = f"watch-{self._member.worker_id}"
        self._task = asyncio.create_task(self._run(), name=name)

    def close(self) -> asyncio.Task[None]:
        """What the index knows of the member is gone when this returns."""
        self._task.cancel()
        self._forget()
        return self._task

    def _forget(self) -> None:
        holder, self._holder, self._is_whole = self._holder, None, False
        if holder is not None:
            self._watches.leave(self._member, holder)

    async def _run(self) -> None:
        settings = self._settings
        pause_s = settings.backoff_min_s
        async with self._watches.dialer.open_channel(self._member.info.address) as channel:
            while True:
                why = await self._watch(WorkerStub(channel))
                had_begun = self._sequence > 0
                self._forget()
                if why is None:
                    return
                self._watches.resyncs[why] += 1
                logger.debug("watch of worker %s ended: %s", self._member.worker_id, why)
                pause_s = settings.backoff_min_s if had_begun else pause_s * 2
                pause_s = min(pause_s, settings.backoff_max_s)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _watch(self, stub: WorkerStub) -> str | None:
        """One stream, and why it ended; None where there will never be another."""
        self._sequence = 0
        request = w.WatchCacheRequest(
            router_id=self._watches.router_id,
            worker_epoch=self._member.info.epoch,
            min_interval_s=self._settings.interval_s,
        )
        call = cast("CacheCall", stub.WatchCache(request, metadata=self._watches.dialer.metadata))
        try:
            async with asyncio.timeout(self._settings.begin_timeout_s):
                update = await call.read()
            while isinstance(update, w.CacheUpdate):
                if (why := self._apply(update)) is not None:
                    return why
                update = await call.read()
            return "ended"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            return "broken"
        except TimeoutError:
            return "silent"
        except ValueError:
            return "malformed"
        except Exception:
            # Whatever it was: what is in the index must not outlive its watch.
            logger.exception("watch of worker %s failed", self._member.worker_id)
            return "failed"
        finally:
            call.cancel()

    def _apply(self, update: w.CacheUpdate) -> str | None:
        """Take an update in, whole; or why the stream is of no use any more."""
        self._sequence += 1
        if update.sequence != self._sequence:
            return "gap"
        removed, stored = prefix_hash.words(update.removed), prefix_hash.words(update.stored)
        if update.reset:
            if self._holder is not None:
                self._watches.resyncs["overflow"] += 1
            self._forget()
            self._holder = self._watches.join(self._member)
            self._began = time.monotonic()
        if self._holder is None:
            return "malformed"
        self._watches.index.apply(self._holder, removed, stored)
        self._is_whole = not update.more
        has_waited = time.monotonic() - self._began > self._settings.reread_s
        if self._holder.truncated and has_waited and self._watches.index.has_room:
            return "room"
        return None
