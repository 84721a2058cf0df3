"""The order in which vLLM's block pool gives blocks away while some are retained."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.cache.retention import RetainedBlocks

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from workers.vllm.cache.retention import RetainingBlockQueue

BLOCKS = 12  # without the null block


class Pool:
    """A block pool of vLLM with our queue, and the blocks in use."""

    def __init__(self, most: int = 100) -> None:
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)
        self.retained = RetainedBlocks(most, 60.0)
        self.queue = RetainingBlockQueue(self.pool, self.retained)
        self.pool.free_block_queue = self.queue

    def use(self, count: int) -> list[int]:
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            block._block_hash = b"%d" % block.block_id  # cached, as full blocks are
        return [x.block_id for x in blocks]

    def touch(self, *ids: int) -> None:
        self.pool.touch([self.pool.blocks[x] for x in ids])

    def free(self, ids: list[int]) -> None:
        """Free the blocks of a request, the deepest first, as vLLM does."""
        self.pool.free_blocks([self.pool.blocks[x] for x in reversed(ids)])

    @property
    def order(self) -> list[int]:
        """The free blocks in the order in which they are given away."""
        found = [x.block_id for x in self.queue.get_all_free_blocks()]
        assert len(found) == len(set(found)) == self.pool.get_num_free_blocks()
        return found


def test_retained_blocks_are_given_away_last_and_the_deepest_of_them_first() -> None:
    pool = Pool()
    turn, other = pool.use(3), pool.use(3)
    pool.free(turn)
    pool.queue.retain([3, 2, 1], 0.0, 5.0)
    pool.free(other)
    assert pool.order == [7, 8, 9, 10, 11, 12, 6, 5, 4, 3, 2, 1]
    assert pool.use(11) == [7, 8, 9, 10, 11, 12, 6, 5, 4, 3, 2]
    assert pool.order == [1]
    assert 1 in pool.retained
    assert pool.use(1) == [1]
    assert (pool.retained.blocks, pool.retained.ended["pressure"]) == (0, 1)


def test_blocks_that_a_request_still_uses_are_retained_when_they_are_free() -> None:
    pool = Pool()
    turn, other = pool.use(3), pool.use(2)
    pool.queue.retain([3, 2, 1], 0.0, 5.0)
    pool.free(turn)
    pool.free(other)
    assert pool.order[-5:] == [5, 4, 3, 2, 1]


def test_a_prefix_stays_retained_after_another_request_has_used_it() -> None:
    pool = Pool()
    pool.free(pool.use(3))
    pool.queue.retain([3, 2, 1], 0.0, 5.0)
    pool.touch(1)
    other = pool.use(2)
    pool.free([1, *other])
    assert pool.order[-5:] == [5, 4, 3, 2, 1]


def test_the_next_turn_takes_its_blocks_and_frees_them_as_others() -> None:
    pool = Pool()
    pool.free(pool.use(2))
    pool.queue.retain([2, 1], 0.0, 5.0)
    pool.touch(1, 2)
    assert (pool.retained.blocks, pool.retained.ended["returned"]) == (0, 1)
    pool.free([1, 2])
    pool.free(pool.use(10))
    assert pool.order[:2] == [2, 1]


def test_the_end_of_retention_makes_its_blocks_the_last_of_the_others() -> None:
    pool = Pool()
    pool.free(pool.use(2))
    pool.queue.retain([2, 1], 0.0, 5.0)
    pool.free(pool.use(2))
    pool.queue.retain([4, 3], 0.0, 50.0)
    pool.queue.release(pool.retained.expire(5.0))
    assert pool.order[-4:] == [2, 1, 4, 3]
    pool.free(pool.use(8))
    assert pool.order[:2] == [2, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_no_block_is_lost_and_none_that_is_retained_is_given_away_before_another(seed: int) -> None:
    chance, pool = random.Random(seed), Pool(most=8)
    running: list[list[int]] = []
    for now in range(60):
        free = pool.order
        match chance.randrange(6):
            case 0 | 1 if free:
                count = chance.randint(1, len(free))
                others = [x for x in free if x not in pool.retained]
                used = pool.use(count)
                assert used == [*others, *(x for x in free if x not in others)][:count]
                running.append(used)
            case 2 if running:
                pool.free(running.pop(chance.randrange(len(running))))
            case 3 if running:
                # Before or after the turn's blocks are free.
                turn = running.pop(chance.randrange(len(running)))
                if is_free := chance.random() < 0.5:
                    pool.free(turn)
                pool.queue.retain(turn[::-1], now, chance.randint(1, 20))
                if not is_free:
                    pool.free(turn)
            case 4 if cached := [x for x in free if pool.pool.blocks[x].block_hash]:
                hit = chance.sample(cached, chance.randint(1, len(cached)))
                pool.touch(*hit)
                running.append(hit)
            case _:
                pool.queue.release(pool.retained.expire(float(now)))
        assert len(pool.order) + len({x for used in running for x in used}) == BLOCKS
        assert pool.retained.blocks <= 8
        ranks = [x in pool.retained for x in pool.order]
        assert ranks == sorted(ranks)
    pool.queue.release(pool.retained.expire(1e9))
    assert pool.retained.blocks == 0
