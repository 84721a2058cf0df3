"""Gather, wire, scatter: what arrives is what a direct copy would have brought, for any block
tables, block sizes, TP sizes and layouts, and nothing else is touched."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.gather import PageLayout, RankCache, gather, paged, scatter
from kv_transfer.reshard import Piece, PoolLayout, Span, plan_all, split

CHANNELS = 4
ITEM = 2  # bytes of an int16, which stands for bfloat16 and can be told apart exactly
LAYERS = 3
POISON = -7
TP = (1, 2, 4, 8)
BLOCK_SIZES = (8, 16, 24, 32, 64)
KV = (
    PageLayout.BLOCKS_HEADS_TOKENS,
    PageLayout.PLANES_BLOCKS_TOKENS,
    PageLayout.BLOCKS_PLANES_TOKENS,
)


def allocate(layout: PageLayout, blocks: int, block_size: int, heads: int) -> torch.Tensor:
    shape = {
        PageLayout.BLOCKS_HEADS_TOKENS: (blocks, heads, block_size, 2 * CHANNELS),
        PageLayout.PLANES_BLOCKS_TOKENS: (2, blocks, block_size, heads, CHANNELS),
        PageLayout.BLOCKS_PLANES_TOKENS: (blocks, 2, block_size, heads, CHANNELS),
        PageLayout.LATENT: (blocks, block_size, CHANNELS),
    }[layout]
    return torch.full(shape, POISON, dtype=torch.int16)


def cell(
    cache: torch.Tensor, layout: PageLayout, place: tuple[int, int, int], plane: int
) -> torch.Tensor:
    """The channels of (block, token in it, head) and plane, by the layout's own definition."""
    block, token, head = place
    match layout:
        case PageLayout.BLOCKS_HEADS_TOKENS:
            return cache[block, head, token, plane * CHANNELS : (plane + 1) * CHANNELS]
        case PageLayout.PLANES_BLOCKS_TOKENS:
            return cache[plane, block, token, head]
        case PageLayout.BLOCKS_PLANES_TOKENS:
            return cache[block, plane, token, head]
        case PageLayout.LATENT:
            return cache[block, token]


@dataclass
class Pool:
    """One pool with the KV of one request, written and read token by token without the code under
    test."""

    shape: PoolLayout
    layout: PageLayout
    table: list[int]
    caches: list[list[torch.Tensor]]  # of each rank, a layer

    @property
    def planes(self) -> int:
        return 1 if self.shape.is_latent else 2

    def each(self, rank: int, token: int) -> list[tuple[tuple[int, int, int, int], torch.Tensor]]:
        """((layer, plane, token, head) of the model, its channels in this rank's memory)."""
        size = self.shape.block_size
        layers, heads = self.shape.layers(rank), self.shape.heads(rank)
        return [
            (
                (layers.start + layer, plane, token, heads.start + head),
                cell(
                    self.caches[rank][layer],
                    self.layout,
                    (self.table[token // size], token % size, head),
                    plane,
                ),
            )
            for layer, plane, head in product(
                range(len(layers)), range(self.planes), range(len(heads))
            )
        ]

    def view(self, rank: int) -> RankCache:
        views = tuple(paged(cache, self.layout) for cache in self.caches[rank])
        return RankCache(self.shape.layers(rank), self.shape.heads(rank), views)


def make_pool(shape: PoolLayout, layout: PageLayout, num_tokens: int, dice: random.Random) -> Pool:
    needed = -(-num_tokens // shape.block_size)
    blocks = needed + dice.randint(0, 5)
    table = dice.sample(range(blocks), needed)
    caches = [
        [
            allocate(layout, blocks, shape.block_size, len(shape.heads(rank)))
            for _ in range(len(shape.layers(rank)))
        ]
        for rank in range(shape.num_ranks)
    ]
    return Pool(shape, layout, table, caches)


def value(where: tuple[int, int, int, int]) -> torch.Tensor:
    """Names the place: no two places of a model have the same channels."""
    layer, plane, token, head = where
    first = ((layer * 2 + plane) * 16 + head) * CHANNELS
    channels = [first + n for n in range(CHANNELS - 1)]
    return torch.tensor([*channels, token], dtype=torch.int16)


def pools_of(
    p: tuple[int, PageLayout, int],
    d: tuple[int, PageLayout, int],
    heads: int,
    num_tokens: int,
    seed: int,
) -> tuple[Pool, Pool]:
    dice = random.Random(seed)
    planes = 1 if p[1] is PageLayout.LATENT else 2

    def shape(tp: int, block_size: int) -> PoolLayout:
        return PoolLayout(
            tp=tp,
            stage_layers=(LAYERS,),
            num_kv_heads=heads,
            head_bytes=planes * CHANNELS * ITEM,
            block_size=block_size,
            dtype="int16",
            is_latent=planes == 1,
        )

    prefill = make_pool(shape(p[0], p[2]), p[1], num_tokens, dice)
    decode = make_pool(shape(d[0], d[2]), d[1], num_tokens, dice)
    for rank in range(prefill.shape.num_ranks):
        for token in range(num_tokens):
            for where, channels in prefill.each(rank, token):
                channels.copy_(value(where))
    return prefill, decode


def transfer(prefill: Pool, decode: Pool, tokens: Span, slot_bytes: int, spread: int) -> None:
    slot = torch.full((slot_bytes,), 0xAA, dtype=torch.uint8)
    head_bytes = prefill.shape.head_bytes
    for piece in plan_all(prefill.shape, decode.shape, tokens=tokens, spread=spread):
        for part in split(piece, head_bytes=head_bytes, slot_bytes=slot_bytes):
            slot.fill_(0xAA)
            sent = gather(prefill.view(part.source_rank), part, prefill.table, slot)
            assert sent == part.size_bytes(head_bytes)
            assert bool((slot[sent:] == 0xAA).all())
            assert scatter(decode.view(part.target_rank), part, decode.table, slot) == sent


def assert_copied(decode: Pool, tokens: Span, num_tokens: int) -> None:
    for rank in range(decode.shape.num_ranks):
        written = 0
        for token in range(num_tokens):
            for where, channels in decode.each(rank, token):
                if tokens.start <= token < tokens.end:
                    assert torch.equal(channels, value(where)), where
                    written += CHANNELS
                else:
                    assert bool((channels == POISON).all()), where
        touched = sum(int((cache != POISON).sum()) for cache in decode.caches[rank])
        assert touched == written


@pytest.mark.parametrize(("p_tp", "d_tp", "heads"), [*product(TP, TP, (2, 8))])
def test_every_pair_of_tp_sizes_gets_what_a_direct_copy_brings(
    p_tp: int, d_tp: int, heads: int
) -> None:
    dice = random.Random(p_tp * 100 + d_tp * 10 + heads)
    p_layout, d_layout = dice.choice(KV), dice.choice(KV)
    p, d = (p_tp, p_layout, 16), (d_tp, d_layout, dice.choice(BLOCK_SIZES))
    prefill, decode = pools_of(p, d, heads, 21, seed=heads)
    transfer(prefill, decode, Span(0, 21), slot_bytes=700, spread=p_tp)
    assert_copied(decode, Span(0, 21), 21)


@settings(deadline=None)
@given(data=st.data())
def test_random_tables_sizes_and_layouts_get_what_a_direct_copy_brings(
    data: st.DataObject,
) -> None:
    side = st.tuples(st.sampled_from(TP[:3]), st.sampled_from(KV), st.sampled_from(BLOCK_SIZES))
    p, d = data.draw(side), data.draw(side)
    heads = data.draw(st.sampled_from((1, 2, 4)))
    num_tokens = data.draw(st.integers(1, 70))
    start = data.draw(st.integers(0, num_tokens - 1))
    tokens = Span(start, num_tokens)
    slot_bytes = data.draw(st.integers(4 * 2 * CHANNELS * ITEM, 4000))
    prefill, decode = pools_of(p, d, heads, num_tokens, data.draw(st.integers(0, 99)))
    transfer(prefill, decode, tokens, slot_bytes, data.draw(st.integers(0, 9)))
    assert_copied(decode, tokens, num_tokens)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1), (2, 8)])
def test_a_latent_reaches_every_rank(p_tp: int, d_tp: int) -> None:
    p, d = (p_tp, PageLayout.LATENT, 8), (d_tp, PageLayout.LATENT, 64)
    prefill, decode = pools_of(p, d, 1, 19, seed=3)
    transfer(prefill, decode, Span(5, 19), slot_bytes=50, spread=2)
    assert_copied(decode, Span(5, 19), 19)


def test_a_page_whose_strides_are_not_its_shape_is_read_where_it_lies() -> None:
    """vLLM keeps FlashAttention's shape and lays heads before tokens when asked to."""
    memory = torch.arange(2 * 3 * 2 * 8 * CHANNELS, dtype=torch.int16).view(2, 3, 2, 8, CHANNELS)
    logical = memory.permute(0, 1, 3, 2, 4)
    view = paged(logical, PageLayout.PLANES_BLOCKS_TOKENS)
    assert view.data_ptr() == memory.data_ptr()
    cache = RankCache(Span(0, 1), Span(0, 2), (view,))
    piece = Piece(0, 0, Span(0, 1), Span(1, 2), Span(2, 11))
    slot = torch.zeros(400, dtype=torch.uint8)
    size = gather(cache, piece, [2, 0], slot)
    got = slot[:size].view(torch.int16).view(2, 9, CHANNELS)
    for plane, token in product(range(2), range(9)):
        block = 2 if token + 2 < 8 else 0
        assert torch.equal(got[plane, token], memory[plane, block, 1, (token + 2) % 8])


def one_rank() -> RankCache:
    cache = allocate(PageLayout.BLOCKS_PLANES_TOKENS, 4, 8, 2)
    return RankCache(Span(2, 3), Span(4, 6), (paged(cache, PageLayout.BLOCKS_PLANES_TOKENS),))


def piece_of(
    layers: tuple[int, int] = (2, 3), heads: tuple[int, int] = (4, 6), end: int = 9
) -> Piece:
    return Piece(0, 0, Span(*layers), Span(*heads), Span(0, end))


@pytest.mark.parametrize(
    ("piece", "block_ids", "slot_bytes", "problem"),
    [
        (piece_of(), [0, 4], 1024, "outside its KV cache"),
        (piece_of(), [0, -1], 1024, "outside its KV cache"),
        (piece_of(end=17), [0, 1], 1024, "is not in 2 blocks"),
        (piece_of(layers=(1, 3)), [0, 1], 1024, "is not inside"),
        (piece_of(heads=(4, 7)), [0, 1], 1024, "is not inside"),
        (piece_of(), [0, 1], 9 * 2 * 16 - 1, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    piece: Piece, block_ids: list[int], slot_bytes: int, problem: str
) -> None:
    cache, slot = one_rank(), torch.zeros(slot_bytes, dtype=torch.uint8)
    with pytest.raises(KvTransferError, match=problem):
        gather(cache, piece, block_ids, slot)
    assert not bool(slot.any())
    with pytest.raises(KvTransferError, match=problem):
        scatter(cache, piece, block_ids, slot)
    assert bool((cache.views[0] == POISON).all())


def test_a_block_named_twice_is_not_written() -> None:
    cache = one_rank()
    with pytest.raises(KvTransferError, match="twice"):
        scatter(cache, piece_of(), [1, 1], torch.zeros(1024, dtype=torch.uint8))
    assert bool((cache.views[0] == POISON).all())


def test_staging_must_be_bytes_in_a_row() -> None:
    for staging in (torch.zeros(1024), torch.zeros(2048, dtype=torch.uint8)[::2]):
        with pytest.raises(KvTransferError, match="no run of bytes"):
            gather(one_rank(), piece_of(), [0, 1], staging)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (PageLayout.BLOCKS_HEADS_TOKENS, (4, 2, 8, 7)),
        (PageLayout.BLOCKS_HEADS_TOKENS, (2, 4, 8, 2, 4)),
        (PageLayout.PLANES_BLOCKS_TOKENS, (4, 2, 8, 2, 4)),
        (PageLayout.BLOCKS_PLANES_TOKENS, (2, 4, 8, 2, 4)),
        (PageLayout.LATENT, (4, 2, 8, 4)),
    ],
)
def test_a_shape_that_is_not_the_layouts_is_refused(
    layout: PageLayout, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedLayout, match=layout.value):
        paged(torch.zeros(shape), layout)


@pytest.mark.parametrize(
    ("layers", "heads", "shapes"),
    [
        (Span(0, 2), Span(0, 2), [(4, 2, 8, 2, 4)]),
        (Span(0, 1), Span(0, 3), [(4, 2, 8, 2, 4)]),
        (Span(0, 2), Span(0, 2), [(4, 2, 8, 2, 4), (5, 2, 8, 2, 4)]),
    ],
)
def test_caches_that_are_not_the_ranks_are_refused(
    layers: Span, heads: Span, shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(UnsupportedLayout):
        RankCache(layers, heads, tuple(torch.zeros(shape) for shape in shapes))
