"""Watches of workers' prefix caches over real gRPC: the index holds what the worker holds, whatever
happens to the stream. The worker's side is the real one; the test plays its engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from pdserve import prefix_hash, rpc
from pdserve.errors import InvalidRequest
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from router.fleet.member import Member
from router.prefix import PrefixWatcher, WatchSettings
from tests.fakes import MODEL, worker_info
from tests.patience import WAIT_S
from workers.cache_feed import CacheFeed
from workers.control import ControlService
from workers.engine import CacheChange
from workers.fake.engine import FakeEngine
from workers.service import WorkerService
from workers.vllm.cache_mirror import CacheMirror

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.types import WorkerInfo

SIZE = 16
FAST = WatchSettings(
    begin_timeout_s=WAIT_S, interval_s=0.0, backoff_min_s=0.001, backoff_max_s=0.01, reread_s=0.0
)


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    yield
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert [name for name in names if name.startswith(("watch-", "prefix-"))] == []


class Service(ControlService):
    """Loses the updates that it is told to lose, and garbles one where it has something to garble
    it with."""

    def __init__(self, service: WorkerService, info: WorkerInfo) -> None:
        super().__init__(service, SimpleNamespace(info=info))  # type: ignore[arg-type]
        self.losing = 0
        self.lost = 0
        self.garble = b""

    async def WatchCache(  # noqa: N802
        self, request: w.WatchCacheRequest, context: Any
    ) -> AsyncIterator[w.CacheUpdate]:
        async for update in super().WatchCache(request, context):
            if self.losing:
                self.losing -= 1
                self.lost += 1
            else:
                update.stored, self.garble = self.garble or update.stored, b""
                yield update


class WatchedWorker:
    """A worker whose cache the test changes, prompt by prompt."""

    def __init__(self, name: str, instance_id: str) -> None:
        self.worker = WorkerService(FakeEngine(MODEL), Role.AGGREGATED, instance_id)
        self.mirror = CacheMirror(MODEL.name, SIZE)
        self.keys: dict[bytes, None] = {}
        self._name, self._instance_id = name, instance_id
        self.service: Service
        self.member: Member

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[WatchedWorker]:
        server = rpc.make_server()
        port = server.add_insecure_port("127.0.0.1:0")
        address = f"127.0.0.1:{port}"
        info = worker_info(
            self._name, Role.AGGREGATED, address=address, instance_id=self._instance_id
        )
        self.service, self.member = Service(self.worker, info), Member(info, lease_end=0.0)
        add_WorkerServicer_to_server(self.service, server)
        await server.start()
        try:
            yield self
        finally:
            self.worker.close_sessions()
            await server.stop(None)
            await self.worker.close()
            await until(lambda: self.worker.cache.watchers == 0)

    def store(self, *tokens: int) -> None:
        """Blocks of one repeated token each, behind one another."""
        keys = [bytes(tokens[: i + 1]) for i in range(len(tokens))]
        self.keys.update(dict.fromkeys(keys))
        self.mirror.store(keys, None, [t for t in tokens for _ in range(SIZE)])
        self.worker.cache.changed(self.mirror.take())

    def evict(self, *tokens: int) -> None:
        gone = bytes(tokens)
        self.keys = {key: None for key in self.keys if not key.startswith(gone)}
        self.mirror.remove(bytes(tokens))
        self.worker.cache.changed(self.mirror.take())


def depth(watches: PrefixWatcher, name: str, *tokens: int) -> int:
    """Blocks of a prompt that the index says a worker has."""
    ids = [t for t in tokens for _ in range(SIZE)]
    chain = prefix_hash.chain(ids, SIZE, prefix_hash.root(MODEL.name, SIZE))
    return watches.index.cached_blocks(chain).get(name, 0)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if what():
                return
            await asyncio.sleep(0.002)


@asynccontextmanager
async def watching(
    *members: Member, router_id: str = "r1", max_blocks: int = 1000
) -> AsyncIterator[PrefixWatcher]:
    """Ends by asserting that no block is left."""
    watches = PrefixWatcher(router_id, max_blocks=max_blocks, settings=FAST)
    for member in members:
        watches.open(member)
    try:
        yield watches
    finally:
        closing = [watches.close(member) for member in list(watches._watches)]
        assert not watches._block_sizes
        if closing:
            await asyncio.wait(closing)
        await until(lambda: not watches.index.needs_purge)
        await watches.aclose()
        assert len(watches.index) == 0


async def test_a_snapshot_and_what_changes_after_it() -> None:
    async with WatchedWorker("a", "e1").serving() as a:
        a.store(1, 2, 3)
        async with watching(a.member) as watches:
            await until(lambda: depth(watches, "a", 1, 2, 3, 4) == 3)
            a.store(1, 2, 3, 4)
            a.store(1, 7)
            await until(lambda: depth(watches, "a", 1, 2, 3, 4) == 4)
            assert depth(watches, "a", 1, 7) == 2
            a.evict(1, 2)
            await until(lambda: depth(watches, "a", 1, 2, 3, 4) == 1)
            a.store(1, 2)
            await until(lambda: depth(watches, "a", 1, 2, 3, 4) == 2)
            assert watches.synced == 1
            assert not watches.resyncs


async def test_random_changes_of_a_few_workers_end_in_what_they_hold() -> None:
    rng = Random(7)
    async with (
        WatchedWorker("a", "e1").serving() as a,
        WatchedWorker("b", "e1").serving() as b,
        watching(a.member, b.member) as watches,
    ):
        for _ in range(60):
            worker = rng.choice((a, b))
            if rng.random() < 0.7 or not worker.keys:
                worker.store(*rng.choices((1, 2), k=rng.randint(1, 6)))
            else:
                worker.evict(*rng.choice(list(worker.keys)))
            if rng.random() < 0.3:
                worker.service.losing = 1
            await asyncio.sleep(0)
        for worker in (a, b):
            # The last update may be the one that was lost: the next one shows that.
            worker.service.losing = 0
            worker.store(9)
        held = {w: set(w.worker.cache.blocks) for w in (a, b)}
        await until(lambda: watches.synced == 2 and len(watches.index) == len(held[a] | held[b]))
        for worker, name in ((a, "a"), (b, "b")):
            for key in worker.keys:
                reached = [bytes(key[: i + 1]) in worker.keys for i in range(len(key))]
                assert depth(watches, name, *key) == [*reached, False].index(False)


async def test_a_lost_update_is_noticed_and_made_good() -> None:
    async with WatchedWorker("a", "e1").serving() as a, watching(a.member) as watches:
        await until(lambda: watches.synced == 1)
        a.service.losing = 1
        a.store(1, 2)
        await until(lambda: a.service.lost == 1)
        assert depth(watches, "a", 1, 2) == 0
        a.store(3)
        await until(lambda: depth(watches, "a", 1, 2) == 2)
        assert watches.resyncs == {"gap": 1}


async def test_a_worker_that_starts_again_is_known_by_its_new_cache_alone() -> None:
    async with watching() as watches:
        async with WatchedWorker("a", "e1").serving() as a:
            a.store(1, 2)
            watches.open(a.member)
            await until(lambda: depth(watches, "a", 1, 2) == 2)
            # Another life of the worker stands where this watch expects the first.
            a.worker.instance_id = "e2"
            a.worker.cache.close()
            await until(lambda: watches.resyncs["broken"] > 2)
            assert depth(watches, "a", 1, 2) == 0
        async with WatchedWorker("a", "e2").serving() as again:
            again.store(1)
            closing = watches.close(a.member)
            watches.open(again.member)
            await until(lambda: depth(watches, "a", 1, 2) == 1)
            await asyncio.wait([closing])


async def test_a_member_that_is_removed_is_found_no_more_at_once() -> None:
    async with WatchedWorker("a", "e1").serving() as a:
        a.store(1, 2)
        async with watching(a.member) as watches:
            await until(lambda: depth(watches, "a", 1, 2) == 2)
            closing = watches.close(a.member)
            assert depth(watches, "a", 1, 2) == 0
            await asyncio.wait([closing])
            await until(lambda: len(watches.index) == 0)
            await until(lambda: a.worker.cache.watchers == 0)


async def test_two_routers_watch_one_worker_and_one_of_them_watches_anew() -> None:
    async with WatchedWorker("a", "e1").serving() as a:
        async with watching(a.member) as one, watching(a.member, router_id="r2") as two:
            a.store(1, 2)
            await until(lambda: depth(one, "a", 1, 2) == depth(two, "a", 1, 2) == 2)
            assert a.worker.cache.watchers == 2
            # The same router, come again: its older watch ends, and comes again in its turn.
            async with watching(a.member):
                await until(lambda: one.resyncs["broken"] >= 1)
            a.store(1, 2, 3)
            await until(lambda: depth(one, "a", 1, 2, 3) == depth(two, "a", 1, 2, 3) == 3)
            assert not two.resyncs
        await until(lambda: a.worker.cache.watchers == 0)


async def test_what_was_refused_is_read_anew_when_there_is_room() -> None:
    async with WatchedWorker("a", "e1").serving() as a:
        a.store(*range(12))
        async with watching(a.member, max_blocks=10) as watches:
            await until(lambda: watches.index.refused_blocks == 2)
            assert (depth(watches, "a", *range(12)), watches.synced) == (10, 0)
            for end in range(12, 7, -1):
                a.evict(*range(end))
            await until(lambda: watches.synced == 1)
            assert watches.resyncs["room"] >= 1
            assert depth(watches, "a", *range(12)) == 7


async def test_a_watcher_that_falls_behind_gets_a_snapshot_anew() -> None:
    feed = CacheFeed(max_pending=4)
    watcher = feed.watch("r1")
    first = await watcher.next_update()
    assert (first.sequence, first.reset, first.more, first.stored) == (1, True, False, b"")
    feed.changed(CacheChange(stored=(1, 2, 3)))
    feed.changed(CacheChange(removed=(3,), stored=(4,)))
    second = await watcher.next_update()
    assert (second.sequence, second.reset) == (2, False)
    assert prefix_hash.unpack(second.removed) == [3]
    assert prefix_hash.unpack(second.stored) == [1, 2, 4]
    feed.changed(CacheChange(stored=(5, 6, 7)))
    feed.changed(CacheChange(removed=(7,), stored=(8, 9)))
    third = await watcher.next_update()
    assert (third.sequence, third.reset) == (3, True)
    assert prefix_hash.unpack(third.stored) == [1, 2, 4, 5, 6, 8, 9]
    feed.leave(watcher)
    assert feed.watchers == 0


async def test_a_large_snapshot_comes_in_parts_and_changes_after_it() -> None:
    feed = CacheFeed()
    count = 40_000
    feed.changed(CacheChange(stored=tuple(range(count))))
    watcher = feed.watch("r1")
    first = await watcher.next_update()
    feed.changed(CacheChange(removed=(count - 1,)))
    blocks = prefix_hash.unpack(first.stored)
    update = first
    while update.more:
        update = await watcher.next_update()
        assert not update.reset
        blocks += prefix_hash.unpack(update.stored)
    assert blocks == list(range(count))
    assert prefix_hash.unpack((await watcher.next_update()).removed) == [count - 1]


class _Older(WorkerServicer):
    """A worker that does not tell its cache."""


async def test_a_worker_that_does_not_tell_its_cache_is_left_alone() -> None:
    server = rpc.make_server()
    add_WorkerServicer_to_server(_Older(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        info = worker_info("old", Role.AGGREGATED, address=f"127.0.0.1:{port}")
        async with watching() as watches:
            member = Member(info, lease_end=0.0)
            watches.open(member)
            task = watches._watches[member].task
            assert task is not None
            await asyncio.wait([task], timeout=WAIT_S)
            assert task.done()
            assert (watches.synced, watches.resyncs) == (0, {})
    finally:
        await server.stop(None)


@pytest.mark.parametrize("field", ["router_id", "instance_id", "min_interval_s"])
async def test_a_watch_that_cannot_be_is_refused_by_name(field: str) -> None:
    values: dict[str, Any] = {"router_id": "r1", "instance_id": "e1", "min_interval_s": 0.0}
    values[field] = {"router_id": "", "instance_id": "e0", "min_interval_s": -1.0}[field]
    async with (
        WatchedWorker("a", "e1").serving() as a,
        rpc.open_channel(a.member.info.address) as channel,
    ):
        call = WorkerStub(channel).WatchCache(w.WatchCacheRequest(**values))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await anext(aiter(call))
        error = rpc.error_from_rpc(raised.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == field


async def test_what_is_no_update_ends_the_watch_and_its_entries() -> None:
    async with WatchedWorker("a", "e1").serving() as a, watching(a.member) as watches:
        a.store(1, 2)
        await until(lambda: depth(watches, "a", 1, 2) == 2)
        a.service.garble = b"123"
        a.store(3)
        await until(lambda: watches.resyncs["malformed"] == 1)
        await until(lambda: depth(watches, "a", 3) == 1)
        assert depth(watches, "a", 1, 2) == 2
