"""What the ranks of one pool ask of the ranks of another: every head once, from who has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart
from kv_transfer.reshard import PoolLayout
from kv_transfer.shard import Shard, whole
from tests.unit.kv_transfer.caches import geometry

SIZES = st.sampled_from([1, 2, 4, 8])
HEAD_PAGE = 4 * 8  # block size times head bytes


def pool(tp: int, heads: int, *, is_latent: bool = False) -> PoolLayout:
    return PoolLayout(tp, (3,), heads, 8, 4, is_latent=is_latent)


@given(source_tp=SIZES, target_tp=SIZES, heads=SIZES, transfer_id=st.text(max_size=8))
def test_each_head_of_each_target_rank_comes_once_from_who_holds_it(
    source_tp: int, target_tp: int, heads: int, transfer_id: str
) -> None:
    source, target = pool(source_tp, heads), pool(target_tp, heads)
    asked: dict[int, list[int]] = {rank: [] for rank in range(source_tp)}
    declined: list[int] = []
    for rank in range(target_tp):
        shard = Shard(target, rank)
        filled: list[int] = []
        for read in shard.reads(source_tp, transfer_id):
            holder = Shard(source, read.source_rank)
            # Both ends make the same of it.
            assert holder.part_of(read.heads) == read.part
            first, count, _ = read.heads
            assert read.part.size == count * HEAD_PAGE
            assert read.part.source_start == (first - holder.heads.start) * HEAD_PAGE
            filled += range(
                read.part.target_start // HEAD_PAGE, read.part.target_start // HEAD_PAGE + count
            )
            assert first - read.part.target_start // HEAD_PAGE == shard.heads.start
            asked[read.source_rank].append(read.readers)
        assert sorted(filled) == list(range(len(shard.heads)))
        declined += shard.declines(source_tp, transfer_id)
    for rank, readers in asked.items():
        assert readers == [len(readers)] * len(readers)
        assert declined.count(rank) == (not readers)
    told = [rank for t in range(target_tp) for rank in Shard(target, t).told(source_tp)]
    assert sorted(told) == list(range(source_tp))


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_latent_comes_whole_from_one_rank(source_tp: int, target_tp: int) -> None:
    for rank in range(target_tp):
        (read,) = Shard(pool(target_tp, 1, is_latent=True), rank).reads(source_tp, "t")
        assert read.part == PagePart(0, 0, HEAD_PAGE)


def test_ranks_of_equal_pools_ask_for_whole_pages() -> None:
    for rank in range(2):
        (read,) = Shard(pool(2, 4), rank).reads(2, "t")
        assert (read.source_rank, read.readers) == (rank, 1)
        assert read.part == PagePart(0, 0, 2 * HEAD_PAGE)


@pytest.mark.parametrize(
    "heads", [[0, 1, 0], [1, 2, 0], [3, 2, 0], [4, 1, 0], [2, 3, 0], [2, 0, 0], [2], [2, 1, 0, 0]]
)
def test_heads_that_are_not_here_are_refused(heads: list[int]) -> None:
    """The second of two ranks, which holds heads 2 and 3 of 4."""
    with pytest.raises(KvTransferError, match="heads"):
        Shard(pool(2, 4), 1).part_of(heads)


def test_no_heads_are_whole_pages() -> None:
    assert Shard(pool(2, 4), 1).part_of([]) is None


def test_a_source_whose_ranks_cannot_share_the_heads_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="num_kv_heads 4 over tp 3"):
        Shard(pool(1, 4)).reads(3, "t")


def test_a_pool_of_one_rank_has_whole_pages() -> None:
    shard = whole(geometry(page=64), 4)
    (read,) = shard.reads(1, "t")
    assert read.part == PagePart(0, 0, 64)
    assert replace(shard.pool, tp=2).heads(1) == shard.heads
    with pytest.raises(UnsupportedLayout, match="3 tokens in a page of 64 bytes"):
        whole(geometry(page=64), 3)
