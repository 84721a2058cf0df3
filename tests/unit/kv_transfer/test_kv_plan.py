"""The plan of which consumer rank reads which KV heads from which producer rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cache.geometry import GroupKind, KvGroup, PagePart
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.protocol.plan import CopyPlan, Shard

SIZES = st.sampled_from([1, 2, 4, 8])
HEAD = 32  # bytes of one head in a page


def shard(tp: int, heads: int, rank: int = 0) -> Shard:
    return Shard(heads, HEAD, KvGroup(0, 4), tp, rank)


def plan(tp: int, heads: list[int], rank: int = 0) -> CopyPlan:
    return CopyPlan(tuple(shard(tp, count, rank) for count in heads))


@given(
    producer_tp=SIZES,
    consumer_tp=SIZES,
    heads=st.lists(SIZES, min_size=1, max_size=3),
    transfer_id=st.text(max_size=8),
)
def test_each_consumer_rank_reads_each_of_its_heads_once_from_a_rank_that_holds_it(
    producer_tp: int, consumer_tp: int, heads: list[int], transfer_id: str
) -> None:
    """Groups may differ in their number of heads."""
    readers: dict[int, list[int]] = {rank: [] for rank in range(producer_tp)}
    declined: list[int] = []
    for rank in range(consumer_tp):
        own = plan(consumer_tp, heads, rank)
        filled: list[list[int]] = [[] for _ in heads]
        for read in own.reads(producer_tp, transfer_id):
            holder = plan(producer_tp, heads, read.producer_rank)
            for part, wanted in ((each.part, each.heads) for each in read.groups):
                group = part.group
                # Both ends compute the same bytes.
                assert holder.part_of(group, wanted) == part
                first, count, before = wanted
                held = holder.shards[group].heads.start
                assert part == PagePart(group, (first - held) * HEAD, before * HEAD, count * HEAD)
                filled[group] += range(first, first + count)
                assert first - before == own.shards[group].heads.start
            readers[read.producer_rank].append(read.readers)
        assert [sorted(each) for each in filled] == [list(s.heads) for s in own.shards]
        declined += own.declines(producer_tp, transfer_id)
    for rank, counts in readers.items():
        assert counts == [len(counts)] * len(counts)
        assert declined.count(rank) == (not counts)
    plans = [plan(consumer_tp, heads, rank) for rank in range(consumer_tp)]
    notified = [p for each in plans for p in each.notifies(producer_tp)]
    assert sorted(notified) == list(range(producer_tp))


def test_replicas_share_the_work_by_transfer() -> None:
    read = {plan(1, [1]).reads(4, f"transfer-{n}")[0].producer_rank for n in range(40)}
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
    second = plan(2, [4], 1)  # holds heads 2 and 3
    with pytest.raises(KvTransferError, match="heads"):
        second.part_of(0, heads)


def test_a_number_of_ranks_that_cannot_share_the_heads_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="4 KV heads cannot be split over 3 ranks"):
        plan(1, [4]).reads(3, "t")


@pytest.mark.parametrize(
    ("kind", "reach", "tokens", "needed"),
    [
        (GroupKind.FULL, 0, 9, range(3)),
        # Windows of 6 tokens: the next token and five before it.
        (GroupKind.WINDOW, 5, 4, range(1)),
        (GroupKind.WINDOW, 5, 8, range(2)),
        (GroupKind.WINDOW, 5, 9, range(1, 3)),
        (GroupKind.WINDOW, 5, 12, range(1, 3)),
        (GroupKind.CHUNK, 8, 7, range(2)),
        (GroupKind.CHUNK, 8, 8, range(2, 2)),  # the next token begins a chunk
        (GroupKind.CHUNK, 8, 13, range(2, 4)),
        (GroupKind.STATE, 0, 8, range(1, 2)),
        (GroupKind.STATE, 0, 9, range(2, 3)),
    ],
)
def test_a_group_needs_the_blocks_that_the_next_token_reads(
    kind: GroupKind, reach: int, tokens: int, needed: range
) -> None:
    assert KvGroup(0, 4, kind, reach).needed(tokens) == needed
