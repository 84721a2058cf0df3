"""The plan of which consumer rank reads which KV heads from which producer rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart
from kv_transfer.protocol.plan import Shard

SIZES = st.sampled_from([1, 2, 4, 8])
HEAD = 32  # bytes of one head in a page


def shard(tp: int, heads: int, rank: int = 0) -> Shard:
    return Shard(heads, HEAD, 4, tp, rank)


@given(producer_tp=SIZES, consumer_tp=SIZES, heads=SIZES, transfer_id=st.text(max_size=8))
def test_each_consumer_rank_reads_each_of_its_heads_once_from_a_rank_that_holds_it(
    producer_tp: int, consumer_tp: int, heads: int, transfer_id: str
) -> None:
    readers: dict[int, list[int]] = {rank: [] for rank in range(producer_tp)}
    declined: list[int] = []
    for rank in range(consumer_tp):
        own = shard(consumer_tp, heads, rank)
        filled: list[int] = []
        for read in own.reads(producer_tp, transfer_id):
            holder = shard(producer_tp, heads, read.producer_rank)
            assert holder.part_of(read.heads) == read.part  # both ends compute the same bytes
            first, count, before = read.heads
            assert read.part == PagePart(
                (first - holder.heads.start) * HEAD, before * HEAD, count * HEAD
            )
            filled += range(first, first + count)
            assert first - before == own.heads.start
            readers[read.producer_rank].append(read.readers)
        assert filled == list(own.heads)
        declined += own.declines(producer_tp, transfer_id)
    for rank, counts in readers.items():
        assert counts == [len(counts)] * len(counts)
        assert declined.count(rank) == (not counts)
    told = [p for c in range(consumer_tp) for p in shard(consumer_tp, heads, c).told(producer_tp)]
    assert sorted(told) == list(range(producer_tp))


def test_replicas_share_the_work_by_transfer() -> None:
    read = {shard(1, 1).reads(4, f"transfer-{n}")[0].producer_rank for n in range(40)}
    assert read == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("tp", "heads", "held"),
    [
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (2, 1, [[0], [0]]),
    ],
)
def test_heads_are_split_as_vllm_splits_them(tp: int, heads: int, held: list[list[int]]) -> None:
    assert [list(shard(tp, heads, rank).heads) for rank in range(tp)] == held


@pytest.mark.parametrize(
    "heads", [[0, 1, 0], [1, 2, 0], [3, 2, 0], [4, 1, 0], [2, 3, 0], [2, 0, 0], [2], [2, 1, 0, 0]]
)
def test_heads_that_are_not_held_are_refused(heads: list[int]) -> None:
    second = shard(2, 4, 1)  # holds heads 2 and 3
    assert second.part_of([]) is None
    with pytest.raises(KvTransferError, match="heads"):
        second.part_of(heads)


def test_a_number_of_ranks_that_cannot_share_the_heads_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="4 KV heads cannot be split over 3 ranks"):
        shard(1, 4).reads(3, "t")
