"""The router's index of a worker's prefix cache follows a real session. The test plays the worker's
engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.model import prefix_hash
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from router.fleet.link_pool import LinkPool
from router.fleet.member import Member
from router.fleet.prefix_watch import PrefixWatcher
from router.fleet.registry import Fleet
from tests.support.router_stack import MODEL, worker_info
from tests.support.timeouts import wait_until
from workers.cache.mirror import CacheMirror
from workers.control.worker_intake import WorkerIntake
from workers.fake.engine import FakeEngine
from workers.link.router_link import OpenLinks, RouterLink
from workers.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZE = 16


class WatchedWorker:
    """A worker whose cache the test changes, prompt by prompt."""

    def __init__(self, name: str, instance_id: str = "e1") -> None:
        self.service = WorkerService(FakeEngine(MODEL), WorkerIntake(Role.AGGREGATED))
        self.links = OpenLinks()
        self.mirror = CacheMirror(MODEL.name, SIZE)
        self.keys: dict[bytes, None] = {}
        self.info = worker_info(name, Role.AGGREGATED, instance_id=instance_id)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[WatchedWorker]:
        loop = asyncio.get_running_loop()
        new_link = partial(RouterLink, self.info.instance_id, self.service, self.links)
        server = await loop.create_server(new_link, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.info = replace(self.info, session_address=f"127.0.0.1:{port}")
        try:
            yield self
        finally:
            server.close()
            await self.links.closed()
            await self.service.close()

    def store(self, *tokens: int) -> None:
        """Store consecutive blocks of one repeated token each."""
        keys = [bytes(tokens[: i + 1]) for i in range(len(tokens))]
        self.keys.update(dict.fromkeys(keys))
        self.mirror.store(keys, None, [t for t in tokens for _ in range(SIZE)])
        self.service._on_cache(self.mirror.take())

    def evict(self, *tokens: int) -> None:
        gone = bytes(tokens)
        self.keys = {key: None for key in self.keys if not key.startswith(gone)}
        self.mirror.remove(gone)
        self.service._on_cache(self.mirror.take())


def depth(watches: PrefixWatcher, name: str, *tokens: int) -> int:
    """Return how many blocks of a prompt the index has for a worker."""
    ids = [t for t in tokens for _ in range(SIZE)]
    chain = prefix_hash.chain(ids, SIZE, prefix_hash.root(MODEL.name, SIZE))
    return watches.index.cached_blocks(chain).get(name, 0)


@asynccontextmanager
async def watching(
    *workers: WatchedWorker, router_id: str = "r1", max_blocks: int = 1000
) -> AsyncIterator[tuple[Fleet, PrefixWatcher]]:
    watches = PrefixWatcher(max_blocks)
    fleet = Fleet(lease_s=3600.0)
    async with LinkPool(fleet, router_id=router_id, watches=watches):
        for worker in workers:
            fleet.register(worker.info)
        await wait_until(lambda: len(watches._holders) == len(workers))
        yield fleet, watches


async def test_random_changes_of_two_workers_end_in_what_they_hold() -> None:
    rng = Random(7)
    async with (
        WatchedWorker("a").serving() as a,
        WatchedWorker("b").serving() as b,
        watching(a, b) as (_, watches),
    ):
        for _ in range(60):
            worker = rng.choice((a, b))
            if rng.random() < 0.7 or not worker.keys:
                worker.store(*rng.choices((1, 2), k=rng.randint(1, 6)))
            else:
                worker.evict(*rng.choice(list(worker.keys)))
            if rng.random() < 0.1:
                for link in worker.links:
                    link._transport.abort()
            await asyncio.sleep(0.001)
        held = {x: set(x.service.cache.blocks) for x in (a, b)}
        await wait_until(lambda: len(watches.index) == len(held[a] | held[b]))
        for worker, name in ((a, "a"), (b, "b")):
            await wait_until(
                lambda x=worker, n=name: all(depth(watches, n, *k) == len(k) for k in x.keys)
            )


async def test_a_large_snapshot_comes_in_parts() -> None:
    async with WatchedWorker("a").serving() as a:
        a.store(1)
        a.service.cache.blocks.update(dict.fromkeys(range(40_000)))
        async with watching(a, max_blocks=100_000) as (_, watches):
            await wait_until(lambda: len(watches.index) == 40_001)


async def test_malformed_updates_are_refused() -> None:
    watches, member = PrefixWatcher(10), Member(worker_info("a", Role.AGGREGATED), lease_end=0.0)
    for update in (w.CacheUpdate(stored=bytes(8)), w.CacheUpdate(reset=True, stored=b"123")):
        with pytest.raises(ValueError, match=r"snapshot|hashes"):
            watches.apply(member, update)
    assert len(watches.index) == 0
