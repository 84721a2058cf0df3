"""The plan between pools of different shape: everything once, nothing else, the same on both
ends."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.reshard import (
    Piece,
    PoolLayout,
    Span,
    check_pools,
    first_token,
    plan,
    plan_all,
    split,
)

TP = (1, 2, 4, 8)
TOKENS = Span(3, 40)


def pool(tp: int, heads: int = 8, **changes: Any) -> PoolLayout:
    values: dict[str, Any] = {
        "tp": tp,
        "stage_layers": (4,),
        "num_kv_heads": heads,
        "head_bytes": 64,
        "block_size": 16,
    }
    return PoolLayout(**(values | changes))


def latent(tp: int, **changes: Any) -> PoolLayout:
    return pool(tp, 1, is_latent=True, **changes)


def cells(piece: Piece) -> set[tuple[int, int]]:
    return set(
        product(
            range(piece.layers.start, piece.layers.end), range(piece.heads.start, piece.heads.end)
        )
    )


def assert_covers(prefill: PoolLayout, decode: PoolLayout, spread: int) -> None:
    for rank in range(decode.num_ranks):
        pieces = plan(prefill, decode, target_rank=rank, tokens=TOKENS, spread=spread)
        whole = cells(Piece(0, rank, decode.layers(rank), decode.heads(rank), TOKENS))
        got = [cell for piece in pieces for cell in cells(piece)]
        assert len(got) == len(set(got))
        assert set(got) == whole
        for piece in pieces:
            assert piece.target_rank == rank
            assert piece.tokens == TOKENS
            piece.layers.within(prefill.layers(piece.source_rank))
            piece.heads.within(prefill.heads(piece.source_rank))


@pytest.mark.parametrize(("p_tp", "d_tp", "heads"), [*product(TP, TP, (1, 2, 4, 8, 16))])
def test_every_decode_rank_is_covered_exactly_once(p_tp: int, d_tp: int, heads: int) -> None:
    for spread in range(9):
        assert_covers(pool(p_tp, heads), pool(d_tp, heads), spread)


@pytest.mark.parametrize(
    ("p_stages", "d_stages"), [((4,), (2, 2)), ((1, 3), (3, 1)), ((1, 1, 2), (4,))]
)
def test_pipeline_stages_need_not_match(
    p_stages: tuple[int, ...], d_stages: tuple[int, ...]
) -> None:
    assert_covers(pool(4, stage_layers=p_stages), pool(2, stage_layers=d_stages), 5)


@pytest.mark.parametrize(("p_tp", "d_tp"), [*product(TP, TP)])
def test_a_latent_comes_whole_from_one_rank(p_tp: int, d_tp: int) -> None:
    pieces = plan_all(latent(p_tp), latent(d_tp), tokens=TOKENS, spread=7)
    assert [p.target_rank for p in pieces] == list(range(d_tp))
    assert all(p.heads == Span(0, 1) and p.layers == Span(0, 4) for p in pieces)


def test_replicas_of_a_latent_share_the_work() -> None:
    pieces = plan_all(latent(4), latent(8), tokens=TOKENS, spread=3)
    assert sorted(p.source_rank for p in pieces) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_replicated_heads_share_the_work() -> None:
    pieces = plan_all(pool(8, 2), pool(8, 2), tokens=TOKENS, spread=0)
    assert sorted(p.source_rank for p in pieces) == list(range(8))


def test_which_replica_sends_follows_the_transfer() -> None:
    sources = {
        plan(latent(4), latent(1), target_rank=0, tokens=TOKENS, spread=n)[0].source_rank
        for n in range(4)
    }
    assert sources == {0, 1, 2, 3}


def test_equal_pools_send_rank_to_rank() -> None:
    pieces = plan_all(pool(4), pool(4), tokens=TOKENS, spread=11)
    assert [(p.source_rank, p.target_rank) for p in pieces] == [(n, n) for n in range(4)]


@pytest.mark.parametrize(
    ("tp", "heads", "owned"),
    [
        (2, 8, [(0, 4), (4, 8)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (2, 1, [(0, 1), (0, 1)]),
    ],
)
def test_heads_are_dealt_out_as_vllm_does(
    tp: int, heads: int, owned: list[tuple[int, int]]
) -> None:
    assert [pool(tp, heads).heads(rank) for rank in range(tp)] == [Span(*o) for o in owned]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"tp": 3}, "num_kv_heads"),
        ({"stage_layers": ()}, "stage_layers"),
        ({"stage_layers": (2, 0)}, "stage_layers"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_kv_heads": True}, "num_kv_heads"),
        ({"head_bytes": -1}, "head_bytes"),
        ({"block_size": 0}, "block_size"),
        ({"is_latent": True}, "num_kv_heads"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"^{field}"):
        pool(**({"tp": 2} | changes))


@pytest.mark.parametrize(
    ("decode", "field"),
    [
        (pool(2, 4), "num_kv_heads"),
        (pool(2, stage_layers=(5,)), "num_layers"),
        (pool(2, head_bytes=32), "head_bytes"),
        (pool(2, dtype="float8_e4m3fn"), "dtype"),
        (latent(2), "is_latent"),
    ],
)
def test_pools_of_different_kv_are_refused_by_field(decode: PoolLayout, field: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"^{field}"):
        check_pools(pool(2), decode)
    with pytest.raises(UnsupportedLayout, match=f"^{field}"):
        plan(pool(2), decode, target_rank=0, tokens=TOKENS, spread=0)


@settings(deadline=None)
@given(
    layers=st.integers(1, 9),
    heads=st.integers(1, 8),
    tokens=st.integers(1, 70),
    slot_tokens=st.integers(1, 900),
)
def test_parts_fit_the_slot_and_make_up_the_piece(
    layers: int, heads: int, tokens: int, slot_tokens: int
) -> None:
    piece = Piece(1, 2, Span(3, 3 + layers), Span(2, 2 + heads), Span(5, 5 + tokens))
    slot_bytes = slot_tokens * heads * 64
    parts = list(split(piece, head_bytes=64, slot_bytes=slot_bytes))
    assert all(0 < part.size_bytes(64) <= slot_bytes for part in parts)
    assert all((p.source_rank, p.target_rank, p.heads) == (1, 2, piece.heads) for p in parts)
    got = [
        (layer, token)
        for p in parts
        for layer in range(p.layers.start, p.layers.end)
        for token in range(p.tokens.start, p.tokens.end)
    ]
    assert len(got) == len(set(got)) == layers * tokens
    assert [p.tokens.start for p in parts] == sorted(p.tokens.start for p in parts)


def test_a_slot_for_less_than_a_token_is_refused() -> None:
    piece = Piece(0, 0, Span(0, 1), Span(0, 2), TOKENS)
    with pytest.raises(KvTransferError, match="slot of 127"):
        list(split(piece, head_bytes=64, slot_bytes=127))


@pytest.mark.parametrize(("cached", "block_size", "first"), [(0, 16, 0), (15, 16, 0), (40, 8, 40)])
def test_a_cached_prefix_counts_in_whole_blocks(cached: int, block_size: int, first: int) -> None:
    assert first_token(cached, block_size) == first


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_pool_is_refused(rank: int) -> None:
    with pytest.raises(KvTransferError, match="rank"):
        plan(pool(2), pool(4), target_rank=rank, tokens=TOKENS, spread=0)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 2), (-1, 2)])
def test_an_empty_span_is_refused(start: int, end: int) -> None:
    with pytest.raises(KvTransferError, match="no span"):
        Span(start, end)
