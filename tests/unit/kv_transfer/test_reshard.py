"""Workers of several tensor-parallel ranks and pipeline stages. Each rank gets the heads of its
layers from the ranks that have them. A failure of one rank fails the request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from kv_transfer.cache.geometry import KvGroup
from kv_transfer.protocol.plan import Shard
from kv_transfer.vllm.step import (
    ConsumerStart,
    ProducerEnded,
    ProducerExpected,
    ProducerProgress,
)
from tests.support.kv_caches import geometry
from tests.support.kv_pair import (
    BLOCK_SIZE,
    FROM,
    TO,
    TOKENS,
    KvWorker,
    KvWorkers,
    N,
    settle,
    until,
)

LAYERS, HEADS, HEAD_PAGE = 3, 4, 16
PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 2), (2, 8), (8, 8)]


@dataclass
class Pool:
    """The ranks of one worker, stepped together as an engine does."""

    ranks: list[KvWorker]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(rank.address for rank in self.ranks)

    @property
    def instance_id(self) -> str:
        return self.ranks[0].instance_id

    def step(self, **parts: Any) -> None:
        for rank in self.ranks:
            rank.step(**parts)

    def prefill(self) -> None:
        self.step(expected=[ProducerExpected("t", "p-t")])
        self.step(progress=[ProducerProgress("t", [FROM], N)])
        self.step(ended=[ProducerEnded("t", TOKENS, True)])

    def start(self, source: Pool, addresses: tuple[str, ...] = ()) -> None:
        shard = source.ranks[0].shard
        assert shard is not None
        self.step(
            starts=[
                ConsumerStart(
                    "t",
                    "d-t",
                    addresses or source.addresses,
                    source.instance_id,
                    N,
                    {0: (0, TO)},
                    tuple((layers,) for layers in shard.stage_layers),
                )
            ]
        )

    def until_ended(self) -> None:
        until(lambda: all(rank.ended for rank in self.ranks), *self.ranks)

    def heads(self, block: int) -> list[list[bytes]]:
        """Return the block's KV by head of the model and layer."""
        found: dict[int, dict[int, bytes]] = {}
        for rank in self.ranks:
            assert rank.shard is not None
            for i, head in enumerate(rank.shard.heads):
                for layer, page in zip(rank.shard.layers, rank.cache.block(block), strict=True):
                    part = page[i * HEAD_PAGE : (i + 1) * HEAD_PAGE]
                    found.setdefault(head, {})[layer] = part
        return [[of[layer] for layer in range(LAYERS)] for _, of in sorted(found.items())]


def pool(kv_workers: KvWorkers, tp: int, name: str, stages: tuple[int, ...] = (3,)) -> Pool:
    ranks = []
    for stage, rank in itertools.product(range(len(stages)), range(tp)):
        shard = Shard(HEADS, HEAD_PAGE, KvGroup(0, BLOCK_SIZE), stages, tp, rank, stage)
        shape = geometry(len(shard.layers), page=len(shard.heads) * HEAD_PAGE)
        worker = kv_workers.worker(shape=shape, shard=shard, instance_id=f"instance-{name}")
        ranks.append(worker)
        # Ranks that hold the same heads hold the same bytes.
        for block in FROM:
            for n, layer in enumerate(shard.layers):
                heads = (bytes([1 + block, 1 + layer, 1 + head, 7]) * 4 for head in shard.heads)
                worker.cache.put(block, n, b"".join(heads))
    return Pool(ranks)


def pools(kv_workers: KvWorkers, source_tp: int, target_tp: int) -> tuple[Pool, Pool]:
    return pool(kv_workers, source_tp, "s"), pool(kv_workers, target_tp, "t")


def settle_all(*each: Pool) -> None:
    settle(*(rank for one in each for rank in one.ranks))


@pytest.mark.parametrize(
    ("source_tp", "source_stages", "target_tp", "target_stages"),
    [
        *((source, (3,), target, (3,)) for source, target in PAIRS),
        (1, (2, 1), 1, (3,)),
        (1, (3,), 1, (1, 2)),
        (1, (1, 2), 1, (2, 1)),
        (2, (2, 1), 1, (1, 1, 1)),
        (2, (1, 2), 4, (3,)),
        (8, (1, 2), 2, (2, 1)),
    ],
)
def test_every_head_of_every_layer_lands_where_its_rank_reads_it(
    kv_workers: KvWorkers,
    source_tp: int,
    source_stages: tuple[int, ...],
    target_tp: int,
    target_stages: tuple[int, ...],
) -> None:
    source = pool(kv_workers, source_tp, "s", source_stages)
    target = pool(kv_workers, target_tp, "t", target_stages)
    outside = [i for i in range(24) if i not in TO]
    before = [[rank.cache.block(i) for i in outside] for rank in target.ranks]
    target.start(source)
    source.prefill()
    settle_all(source, target)
    for s, t in zip(FROM, TO, strict=True):
        assert target.heads(t) == source.heads(s)
    for rank in target.ranks:
        assert (rank.ended, rank.failed) == (["d-t"], [])
        assert rank.arrivals["d-t"].token_ids == TOKENS
        assert rank.arrivals["d-t"].report.blocks == len(TO)
    assert [[rank.cache.block(i) for i in outside] for rank in target.ranks] == before
    # Each once, also those whose heads were read from another rank.
    assert [rank.sent for rank in source.ranks] == [["p-t"]] * len(source.ranks)
    total = sum(rank.arrivals["d-t"].report.bytes for rank in target.ranks)
    assert total == len(TO) * 3 * HEADS * HEAD_PAGE * max(1, target_tp // HEADS)


def test_ranks_in_the_wrong_order_are_found_out(kv_workers: KvWorkers) -> None:
    source, target = pools(kv_workers, 2, 2)
    before = [rank.cache.snapshot() for rank in target.ranks]
    source.step(expected=[ProducerExpected("t", "p-t")])
    target.start(source, source.addresses[::-1])
    target.until_ended()
    assert "are not held here" in target.ranks[0].failures["d-t"]
    source.step(progress=[ProducerProgress("t", [FROM], N)])
    source.step(ended=[ProducerEnded("t", TOKENS, True)])
    settle_all(source, target)
    assert [rank.cache.snapshot() for rank in target.ranks] == before
