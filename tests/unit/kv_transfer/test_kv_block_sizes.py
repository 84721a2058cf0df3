"""Pools of different block sizes, and of different numbers of ranks with it, exchange KV over each
transport: every token lands where its rank reads it, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import pytest

from kv_transfer.reshard import PoolLayout
from kv_transfer.shard import Shard
from kv_transfer.step import SourceEnded, SourceExpected, SourceProgress, TargetStart
from tests.unit.kv_transfer.caches import geometry, turned
from tests.unit.kv_transfer.fake_device import NcclWorld, ipc_transport
from tests.unit.kv_transfer.rig import TOKENS, Rig, Worker, by_name, until
from tests.unit.kv_transfer.torch_mover import DeviceCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from kv_transfer.transport.loopback import LoopbackTransport

LAYERS, BLOCKS, HEADS, CONTENT = 2, 14, 4, 6
SLOT_BYTES = 3100
RANKS, SIZES = (1, 2, 4, 8), (8, 16, 24, 32, 64)
TRANSPORTS = ("loopback", "shm", "tcp", "nccl", "cuda_ipc")
Where = tuple[int, int, int, int]  # layer, block, token of the block, head of the rank


def value(layer: int, token: int, head: int) -> bytes:
    """Of the model's head."""
    return bytes([layer + 1, token + 1, head + 1, layer ^ token, 7, head])


@dataclass
class Rank:
    """One rank's worker and its cache, by token."""

    worker: Worker
    shard: Shard

    def each(self, table: list[int], tokens: range) -> Iterator[tuple[Where, bytes]]:
        """Where these tokens of the prompt lie, and what they are."""
        size, heads = self.shard.pool.block_size, self.shard.heads
        for layer, token, head in product(range(LAYERS), tokens, range(len(heads))):
            where = (layer, table[token // size], token % size, head)
            yield where, value(layer, token, heads.start + head)

    def _places(self, where: Where) -> list[int]:
        _, _, token, head = where
        order = self.worker.order
        assert order is not None
        return [head * order.places.size + int(place) for place in order.places[token]]

    def read(self, where: Where) -> bytes:
        layer, block, token, head = where
        if self.worker.made is not None:
            return bytes(self.worker.made.cells[layer, block, head, token].tolist())
        page = self.worker.cache.block(block)[layer]
        return bytes(page[place] for place in self._places(where))

    def write(self, where: Where, content: bytes) -> None:
        layer, block, token, head = where
        if self.worker.made is not None:
            for i, byte in enumerate(content):
                self.worker.made.cells[layer, block, head, token, i] = byte
            return
        page = bytearray(self.worker.cache.block(block)[layer])
        for place, byte in zip(self._places(where), content, strict=True):
            page[place] = byte
        self.worker.cache.put(block, layer, bytes(page))

    def all(self) -> dict[Where, bytes]:
        size = self.shard.pool.block_size
        sizes = (LAYERS, BLOCKS, size, len(self.shard.heads))
        return {where: self.read(where) for where in product(*(range(n) for n in sizes))}  # type: ignore[misc]


@dataclass
class Pool:
    """The ranks of one worker, stepped together."""

    ranks: list[Rank]
    table: list[int] = field(default_factory=list)

    @property
    def workers(self) -> list[Worker]:
        return [rank.worker for rank in self.ranks]

    def step(self, **parts: Any) -> None:
        for worker in self.workers:
            worker.step(**parts)


def pool(rig: Rig, name: str, shape: tuple[int, int], layout: str, **settings: Any) -> Pool:
    """`layout` "" is that of a CPU, packed; else where heads lie on a GPU."""
    tp, block_size = shape
    model = PoolLayout(tp, (LAYERS,), HEADS, CONTENT, block_size)
    ranks = []
    for n in range(tp):
        shard = Shard(model, n)
        heads = len(shard.heads)
        made = layout and DeviceCache(layout, (LAYERS, BLOCKS, heads, block_size, CONTENT))
        page = heads * block_size * CONTENT
        worker = rig.worker(
            shape=geometry(LAYERS, BLOCKS, page),
            order=turned(block_size, CONTENT),
            made=made or None,
            shard=shard,
            instance_id=f"{name}-instance",
            **settings,
        )
        ranks.append(Rank(worker, shard))
    return Pool(ranks)


# Whose slots hold a block of each size, and no whole number of any.
GPU = {
    "nccl": lambda: partial(NcclWorld().transport, slot_bytes=SLOT_BYTES),
    "cuda_ipc": lambda: partial(ipc_transport, slot_bytes=SLOT_BYTES),
}


@dataclass
class Bench:
    """A rig of the transport, and the layouts of both ends' caches."""

    rig: Rig
    transport: str
    layouts: list[str]


@pytest.fixture(params=TRANSPORTS)
def bench(
    request: pytest.FixtureRequest, loopback: LoopbackTransport, clean: None
) -> Iterator[Bench]:
    name = request.param
    rig = Rig(GPU[name]() if name in GPU else by_name(name, loopback))
    yield Bench(rig, name, ["NHD", "HND"] if name in GPU else ["", ""])
    rig.close()


def test_every_token_lands_where_its_rank_reads_it(bench: Bench) -> None:
    """Between them the transports see every pair of numbers of ranks."""
    pairs = list(product(RANKS, RANKS))[TRANSPORTS.index(bench.transport) :: len(TRANSPORTS)]
    for ranks in pairs:
        sizes = random.Random(repr(ranks)).sample(SIZES, 2)
        check_transfer(bench, *zip(ranks, sizes, strict=True))


def check_transfer(bench: Bench, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    """`ours` is (ranks, tokens of a block) of the source."""
    dice, rig, layouts = random.Random(repr((ours, theirs))), bench.rig, bench.layouts
    tokens = dice.randrange(40, 100)
    cached = dice.randint(0, min(2, tokens // theirs[1]))  # blocks that the target has already
    dice.shuffle(layouts)
    source = pool(rig, "s", ours, layouts[0], chunk_bytes=dice.choice([1, 700, 1 << 20]))
    target = pool(rig, "t", theirs, layouts[1])
    source.table = dice.sample(range(BLOCKS), -(-tokens // ours[1]))
    target.table = dice.sample(range(BLOCKS), -(-tokens // theirs[1]))
    wanted = range(cached * theirs[1], tokens)
    for rank in source.ranks:
        for where, content in rank.each(source.table, range(tokens)):
            rank.write(where, content)
    want = [rank.all() | dict(rank.each(target.table, wanted)) for rank in target.ranks]

    to, (first, *_) = target.table[cached:], source.workers
    addresses = tuple(worker.half.address for worker in source.workers)
    start = TargetStart("t", "d-t", addresses, first.instance_id, cached, tokens, to)
    target.step(starts=[start])
    source.step(expected=[SourceExpected("t", "p-t")])
    for ready in (dice.randrange(tokens), tokens):
        blocks = source.table[: -(-ready // ours[1])]
        source.step(progress=[SourceProgress("t", blocks, ready)])
    source.step(ended=[SourceEnded("t", TOKENS, held=True)])
    everybody = [*source.workers, *target.workers]
    until(lambda: all(worker.is_empty for worker in everybody), *everybody)
    for worker in everybody:
        worker.collect()

    assert [rank.all() for rank in target.ranks] == want
    assert [worker.failed for worker in target.workers] == [[]] * theirs[0]
    reports = [worker.arrivals["d-t"].report for worker in target.workers]
    assert all(report.blocks == len(to) for report in reports)
    copies = max(1, theirs[0] // HEADS)
    moved = LAYERS * len(wanted) * HEADS * CONTENT * copies
    assert sum(report.bytes for report in reports) == moved
    assert [worker.sent for worker in source.workers] == [["p-t"]] * ours[0]


def test_a_cache_whose_tokens_cannot_be_told_apart_gives_blocks_of_its_own_size_alone(
    tcp_rig: Rig,
) -> None:
    source = tcp_rig.worker()
    target = pool(tcp_rig, "t", (1, 8), "")
    (worker,) = target.workers
    start = TargetStart("t", "d-t", (source.half.address,), source.instance_id, 0, 16, [1, 2])
    source.expect("t")
    target.step(starts=[start])
    until(lambda: worker.ended, worker, source)
    assert worker.failures == {"d-t": "blocks of 8 tokens were granted, where 4 move"}
    source.compute("t", [0, 1, 2, 3], 16)
    source.finish("t")
    until(lambda: worker.is_empty and source.is_empty, worker, source)
    assert source.sent == ["p-t"]
