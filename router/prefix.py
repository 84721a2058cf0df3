"""Prefix cache index: which worker has which KV blocks cached, kept current by the workers' events.

Blocks are named by chain hashes (pdserve/prefix_hash.py): a hash stands for a block and all blocks
before it, for one model and one block size.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc.aio

from pdserve import prefix_hash, rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from router.fleet.member import Member
    from router.placement.values import Demand

logger = logging.getLogger(__name__)

_PURGE_BLOCKS = 1 << 14  # blocks looked at per purge step: about 2 ms

CacheCall = grpc.aio.UnaryStreamCall[w.WatchCacheRequest, w.CacheUpdate]


@dataclass(slots=True, eq=False)
class Holder:
    """A worker in the index, from one snapshot of its cache to the next. `truncated` is True if the
    index had no room for some of its blocks."""

    worker_id: str
    bit: int
    truncated: bool = False


class PrefixIndex:
    """Maps a block hash to a bit mask of the workers that have the block cached."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.refused_blocks = 0
        self._masks: dict[int, int] = {}
        self._live: dict[int, Holder] = {}  # by bit
        self._live_mask = 0
        self._departed_mask = 0  # workers whose blocks have to be purged
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def truncated_workers(self) -> int:
        return sum(holder.truncated for holder in self._live.values())

    @property
    def has_room(self) -> bool:
        """Return True if reading a truncated worker's cache again is worthwhile."""
        return len(self._masks) < 0.9 * self.max_blocks

    def join(self, worker_id: str) -> Holder:
        """Add a worker without blocks."""
        if not self._free_bits:
            used = self._live_mask | self._departed_mask
            self._free_bits.append(1 << used.bit_length())
        holder = Holder(worker_id, self._free_bits.pop())
        self._live[holder.bit] = holder
        self._live_mask |= holder.bit
        return holder

    def leave(self, holder: Holder) -> None:
        """Remove a worker. Lookups ignore its blocks from now on; `purge` frees them."""
        del self._live[holder.bit]
        self._live_mask &= ~holder.bit
        self._departed_mask |= holder.bit

    def apply(self, holder: Holder, removed: Iterable[int], stored: Iterable[int]) -> None:
        """Apply one cache update. Unknown removals and repeated stores are ignored."""
        masks, bit, live = self._masks, holder.bit, self._live_mask
        for block in removed:
            mask = masks.get(block, 0)
            if mask & bit:
                if mask := mask & live & ~bit:
                    masks[block] = mask
                else:
                    del masks[block]
        for block in stored:
            mask = masks.get(block, 0)
            if mask or len(masks) < self.max_blocks:
                masks[block] = mask | bit
            else:
                holder.truncated = True
                self.refused_blocks += 1

    def cached_blocks(self, chain: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of `chain` each worker has; workers with none are left
        out."""
        found: dict[str, int] = {}
        holders, depth = self._live_mask, 0
        for block in chain:
            remaining = self._masks.get(block, 0) & holders
            if remaining != holders:
                if depth:
                    self._record(found, holders ^ remaining, depth)
                holders = remaining
                if not holders:
                    break
            depth += 1
        if depth:
            self._record(found, holders, depth)
        return found

    def _record(self, found: dict[str, int], holders: int, depth: int) -> None:
        while holders:
            bit = 1 << (holders.bit_length() - 1)
            found[self._live[bit].worker_id] = depth
            holders ^= bit

    @property
    def needs_purge(self) -> bool:
        return bool(self._departed_mask)

    def purge(self) -> Iterator[None]:
        """Free the blocks of workers that left, in steps short enough for the event loop."""
        departed, masks = self._departed_mask, self._masks
        for count, block in enumerate(list(masks)):
            mask = masks.get(block, 0)
            if mask & departed:
                if mask := mask & ~departed:
                    masks[block] = mask
                else:
                    del masks[block]
            if count % _PURGE_BLOCKS == _PURGE_BLOCKS - 1:
                yield
        self._departed_mask &= ~departed
        while departed:
            bit = 1 << (departed.bit_length() - 1)
            self._free_bits.append(bit)
            departed ^= bit


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """A worker sends at most one update in `interval_s`. A truncated worker's cache is read again
    after `reread_s` if the index has room."""

    begin_timeout_s: float = 5.0
    interval_s: float = 0.1
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    reread_s: float = 30.0


class PrefixWatcher:
    """Keeps the index current: owns one task and one gRPC channel for each watched worker.

    A worker's blocks are in the index from its snapshot until its stream breaks; a new stream
    starts with a new snapshot. `resyncs` counts streams that broke, by reason.
    """

    def __init__(
        self,
        router_id: str,
        *,
        max_blocks: int,
        settings: WatchSettings | None = None,
        dialer: rpc.Dialer = rpc.PLAIN,
    ) -> None:
        self.index = PrefixIndex(max_blocks)
        self.resyncs: Counter[str] = Counter()
        self._router_id = router_id
        self._dialer = dialer
        self._settings = settings or WatchSettings()
        self._watches: dict[Member, _Watch] = {}
        self._block_sizes: Counter[tuple[str, int]] = Counter()  # of synced workers, by model
        self._purger: asyncio.Task[None] | None = None

    @property
    def synced(self) -> int:
        """Number of workers whose whole cache is in the index."""
        return sum(watch.is_synced for watch in self._watches.values())

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """Return how many prompt tokens each worker would take from its cache, by worker id."""
        cached: dict[str, int] = {}
        for model, block_size in self._block_sizes:
            if model == demand.model:
                blocks = self.index.cached_blocks(demand.block_hashes(block_size))
                cached |= {worker: count * block_size for worker, count in blocks.items()}
        return cached

    def open(self, member: Member) -> None:
        """Watch a worker until `close`."""
        watch = self._watches[member] = _Watch(member)
        name = f"watch-{member.worker_id}"
        watch.task = asyncio.create_task(self._run(watch), name=name)

    def close(self, member: Member) -> asyncio.Task[None]:
        """Forget a worker's blocks and cancel its task, which is returned to be awaited."""
        watch = self._watches.pop(member)
        assert watch.task is not None
        watch.task.cancel()
        self._forget(watch)
        return watch.task

    async def aclose(self) -> None:
        """Wait for the purge task. Every worker has been closed before."""
        if self._purger is not None:
            self._purger.cancel()
            await asyncio.wait([self._purger])

    async def _run(self, watch: _Watch) -> None:
        settings = self._settings
        pause_s = settings.backoff_min_s
        async with self._dialer.open_channel(watch.member.info.address) as channel:
            while True:
                why = await self._stream(watch, WorkerStub(channel))
                self._forget(watch)
                if why is None:
                    return
                self.resyncs[why] += 1
                logger.debug("watch of worker %s ended: %s", watch.member.worker_id, why)
                pause_s = settings.backoff_min_s if watch.sequence else pause_s * 2
                pause_s = min(pause_s, settings.backoff_max_s)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _stream(self, watch: _Watch, stub: WorkerStub) -> str | None:
        """Apply one stream of updates. Return why it ended, None if the worker has no cache
        events."""
        watch.sequence = 0
        request = w.WatchCacheRequest(
            router_id=self._router_id,
            instance_id=watch.member.info.instance_id,
            min_interval_s=self._settings.interval_s,
        )
        call = cast("CacheCall", stub.WatchCache(request, metadata=self._dialer.metadata))
        try:
            async with asyncio.timeout(self._settings.begin_timeout_s):
                update = await call.read()
            while isinstance(update, w.CacheUpdate):
                if (why := self._apply(watch, update)) is not None:
                    return why
                update = await call.read()
            return "ended"
        except grpc.aio.AioRpcError as error:
            return None if error.code() is grpc.StatusCode.UNIMPLEMENTED else "broken"
        except TimeoutError:
            return "silent"
        except ValueError:
            return "malformed"
        except Exception:
            # Entries must not outlive the stream that keeps them current.
            logger.exception("watch of worker %s failed", watch.member.worker_id)
            return "failed"
        finally:
            call.cancel()

    def _apply(self, watch: _Watch, update: w.CacheUpdate) -> str | None:
        """Apply an update. Return a reason if the stream has to start again."""
        now = asyncio.get_running_loop().time()
        watch.sequence += 1
        if update.sequence != watch.sequence:
            return "gap"
        removed, stored = prefix_hash.unpack(update.removed), prefix_hash.unpack(update.stored)
        if update.reset:
            if watch.holder is not None:
                self.resyncs["overflow"] += 1
            self._forget(watch)
            watch.holder, watch.began = self.index.join(watch.member.worker_id), now
            self._block_sizes[watch.block_size] += 1
        if watch.holder is None:
            return "malformed"
        self.index.apply(watch.holder, removed, stored)
        watch.is_whole = not update.more
        may_reread = now - watch.began > self._settings.reread_s and self.index.has_room
        return "room" if watch.holder.truncated and may_reread else None

    def _forget(self, watch: _Watch) -> None:
        holder, watch.holder, watch.is_whole = watch.holder, None, False
        if holder is None:
            return
        self._block_sizes[watch.block_size] -= 1
        if not self._block_sizes[watch.block_size]:
            del self._block_sizes[watch.block_size]
        self.index.leave(holder)
        if self._purger is None or self._purger.done():
            self._purger = asyncio.create_task(self._purge(), name="prefix-purge")

    async def _purge(self) -> None:
        while self.index.needs_purge:
            for _ in self.index.purge():
                await asyncio.sleep(0)


@dataclass(slots=True, eq=False)
class _Watch:
    """The watch of one worker. `holder` is None while there is no snapshot, `is_whole` False until
    all of it has arrived; `sequence` is the last update's number."""

    member: Member
    task: asyncio.Task[None] | None = None
    holder: Holder | None = None
    is_whole: bool = False
    sequence: int = 0
    began: float = 0.0

    @property
    def is_synced(self) -> bool:
        return self.is_whole and self.holder is not None and not self.holder.truncated

    @property
    def block_size(self) -> tuple[str, int]:
        return self.member.info.model.name, self.member.info.block_size
