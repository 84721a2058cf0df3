"""What every transport must do alike, whatever it is made of: random tables, sizes and moments."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.rig import BLOCK_SIZE, settle, until

if TYPE_CHECKING:
    from tests.unit.kv_transfer.rig import Rig, Worker

Tables = dict[str, tuple[list[int], int]]
BLOCKS = geometry().num_blocks
BLOCK_BYTES = geometry().block_bytes


def begin(
    dice: random.Random, source: Worker, target: Worker, number: int, tables: Tables
) -> dict[str, list[int]]:
    """Start transfers over random tables; return each one's blocks at the consumer."""
    free, granted = dice.sample(range(BLOCKS), BLOCKS), {}
    for n in range(number):
        count = dice.randint(1, BLOCKS // number)
        to, free = free[:count], free[count:]
        tokens = count * BLOCK_SIZE - dice.randrange(BLOCK_SIZE)
        granted[f"t{n}"] = to
        table = dice.sample(range(BLOCKS), count)
        source.expect(f"t{n}")
        target.start(source, f"t{n}", to, tokens)
        half = dice.randint(0, tokens)
        source.compute(f"t{n}", table[: -(-half // BLOCK_SIZE)], half)
        tables[f"t{n}"] = table, tokens
    return granted


def end(source: Worker, tables: Tables) -> None:
    for transfer_id, (table, tokens) in tables.items():
        source.compute(transfer_id, table, tokens)
        source.finish(transfer_id)


def pair(rig: Rig, dice: random.Random) -> tuple[Worker, Worker]:
    source, target = rig.pair(chunk_bytes=dice.randint(1, 5) * BLOCK_BYTES, lease_s=3600.0)
    return source, target


@pytest.mark.parametrize("seed", range(4))
def test_random_tables_arrive_block_for_block_and_nothing_else_changes(rig: Rig, seed: int) -> None:
    dice = random.Random(seed)
    source, target = pair(rig, dice)
    tables: Tables = {}
    want = target.cache.blocks()
    granted = begin(dice, source, target, dice.randint(1, 4), tables)
    end(source, tables)
    settle(source, target)
    assert target.failed == []
    for transfer_id, to in granted.items():
        for old, new in zip(tables[transfer_id][0], to, strict=True):
            want[new] = source.cache.block(old)
    assert target.cache.blocks() == want


@pytest.mark.parametrize("who", ["source", "target", "cancel"])
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_was_given_back_is_not_written_again(rig: Rig, who: str, seed: int) -> None:
    """The link breaks at either end, or the target gives up, somewhere among the chunks."""
    dice = random.Random(seed)
    source, target = pair(rig, dice)
    tables: Tables = {}
    before = target.cache.blocks()
    granted = begin(dice, source, target, 3, tables)
    until(lambda: target.links, source, target)
    if who == "cancel":
        target.cancel(*granted)
    else:
        worker = source if who == "source" else target
        until(lambda: worker.links, source, target)
        for link in worker.links:
            worker.peers._drop(link, "broken by the test")
    until(lambda: len(target.ended) == len(granted), source, target)
    given_back = target.cache.snapshot()
    for block in range(BLOCKS):
        source.cache.write(block, seed=1000 + block)
    end(source, tables)
    # A source whose target never reached it holds its blocks until somebody says no.
    source.step(released=list(granted))
    settle(source, target)
    assert target.cache.snapshot() == given_back
    mine = {block for to in granted.values() for block in to}
    after = target.cache.blocks()
    assert all(after[block] == before[block] for block in range(BLOCKS) if block not in mine)
    for worker in (source, target, source):
        worker.close()
