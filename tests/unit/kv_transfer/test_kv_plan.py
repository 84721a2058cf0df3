"""The plan of which consumer rank reads which KV heads and layers from which producer rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_transfer.cache.geometry import GroupKind, KvGroup
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.protocol.plan import CopyPlan, Ranks, Shard

SIZES = st.sampled_from([1, 2, 4, 8])
HEAD = 32  # bytes of one head in a page
STAGES = st.integers(1, 3)


def plan(
    tp: int,
    heads: list[int],
    rank: int = 0,
    layers: list[tuple[int, ...]] | None = None,
    stage: int = 0,
) -> CopyPlan:
    """Return the plan of a rank. `layers` has those of each stage, by group."""
    shards = zip(heads, layers or [(3,)] * len(heads), strict=True)
    group = KvGroup(0, 4)
    return CopyPlan(tuple(Shard(n, HEAD, group, of, tp, rank, stage) for n, of in shards))


def plans(tp: int, heads: list[int], layers: list[tuple[int, ...]]) -> list[CopyPlan]:
    """Return the plans of all ranks of a worker."""
    return [
        plan(tp, heads, rank, layers, stage)
        for stage in range(len(layers[0]))
        for rank in range(tp)
    ]


def one_stage(tp: int, groups: int = 1) -> Ranks:
    return Ranks(tp, ((3,) * groups,))


@st.composite
def splits(draw: st.DrawFn, totals: list[int]) -> list[tuple[int, ...]]:
    """Split the layers of each group over some stages, in any way: a stage may have none of one
    group, but has some of another."""
    stages = draw(STAGES)
    found = []
    for total in totals:
        cuts = sorted(
            draw(st.lists(st.integers(0, total), min_size=stages - 1, max_size=stages - 1))
        )
        found.append(tuple(b - a for a, b in itertools.pairwise([0, *cuts, total])))
    assume(all(any(each) for each in zip(*found, strict=True)))
    return found


@given(
    producer_tp=SIZES,
    consumer_tp=SIZES,
    heads=st.lists(SIZES, min_size=1, max_size=3),
    names=st.tuples(st.text(max_size=8), st.text(max_size=8)),
    data=st.data(),
)
def test_each_consumer_rank_reads_each_head_of_its_layers_once_from_a_rank_that_holds_it(
    producer_tp: int,
    consumer_tp: int,
    heads: list[int],
    names: tuple[str, str],
    data: st.DataObject,
) -> None:
    """Groups may differ in their number of heads and layers."""
    totals = data.draw(st.lists(st.integers(1, 5), min_size=len(heads), max_size=len(heads)))
    producers = plans(producer_tp, heads, data.draw(splits(totals)))
    consumers = plans(consumer_tp, heads, data.draw(splits(totals)))
    readers: dict[int, list[int]] = {rank: [] for rank in range(len(producers))}
    declined: list[int] = []
    told = producers[0].own.stage_layers
    for own in consumers:
        filled: list[list[tuple[int, int]]] = [[] for _ in heads]
        ranks = own.ranks_of(len(producers), told)
        for read in own.reads(ranks, names):
            holder = producers[read.producer_rank]
            for each in read.groups:
                part, group = each.part, each.part.group
                # Both ends compute the same bytes.
                assert holder.part_of(group, each.heads, each.layers) == part
                assert part.size == each.heads[1] * HEAD
                assert part.layers == each.layers[1] > 0
                for of, span, starts in (
                    (holder, 0, (part.source_start // HEAD, part.source_layer)),
                    (own, 2, (part.target_start // HEAD, part.target_layer)),
                ):
                    shard = of.shards[group]
                    assert each.heads[0] - shard.heads.start == starts[0]
                    assert each.layers[0] - shard.layers.start == starts[1]
                    assert span == 0 or (each.heads[2], each.layers[2]) == starts
                filled[group] += itertools.product(
                    range(each.layers[0], sum(each.layers[:2])),
                    range(each.heads[0], sum(each.heads[:2])),
                )
            readers[read.producer_rank].append(read.readers)
        assert [sorted(each) for each in filled] == [
            list(itertools.product(shard.layers, shard.heads)) for shard in own.shards
        ]
        declined += own.declines(ranks, names)
    for rank, counts in readers.items():
        assert counts == [len(counts)] * len(counts)
        assert declined.count(rank) == (not counts)
    notified = [p for each in consumers for p in each.notifies(len(producers))]
    assert sorted(notified) == list(range(len(producers)))


def test_replicas_share_the_work_by_pairs_of_workers() -> None:
    """All transfers of a pair use the same ranks: each pair of ranks needs a communicator."""
    names = [(f"d-{n}", "p") for n in range(40)]
    read = {plan(1, [1]).reads(one_stage(4), name)[0].producer_rank for name in names}
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
    assert [list(plan(tp, [heads], rank).shards[0].heads) for rank in range(tp)] == held


@pytest.mark.parametrize(
    "heads", [[0, 1, 0], [1, 2, 0], [3, 2, 0], [4, 1, 0], [2, 3, 0], [2, 0, 0], [2], [2, 1, 0, 0]]
)
def test_heads_and_layers_that_are_not_held_are_refused(heads: list[int]) -> None:
    second = plan(2, [4], 1)  # holds heads 2 and 3
    with pytest.raises(KvTransferError, match="heads"):
        second.part_of(0, heads, [0, 3, 0])
    second = plan(1, [4], 0, [(2, 2)], 1)  # holds layers 2 and 3
    with pytest.raises(KvTransferError, match="layers"):
        second.part_of(0, [0, 4, 0], heads)


def test_a_number_of_ranks_that_cannot_share_the_heads_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="4 KV heads cannot be split over 3 ranks"):
        plan(1, [4]).reads(one_stage(3), ("d", "p"))


@pytest.mark.parametrize(
    ("ranks", "stages", "match"),
    [
        (3, ((1, 1), (2, 1)), "3 ranks in 2 pipeline stages"),
        (1, ((1, 1), (2, 1)), "1 ranks in 2 pipeline stages"),
        (2, ((1, 1), (2, 2)), "the model has"),
        (2, ((1, 1), (2,)), "the model has"),
        (2, ((3,), (2,)), "the model has"),
    ],
)
def test_a_producer_of_other_stages_than_the_models_is_refused(
    ranks: int, stages: tuple[tuple[int, ...], ...], match: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=match):
        plan(1, [2, 2], layers=[(3,), (2,)]).ranks_of(ranks, stages)


def test_a_producer_that_tells_no_stages_has_one() -> None:
    assert plan(1, [2, 2], layers=[(1, 2), (2, 0)]).ranks_of(2, ()) == Ranks(2, ((3, 2),))


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
