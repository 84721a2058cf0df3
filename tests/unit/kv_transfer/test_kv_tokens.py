"""Single tokens of a cache in host memory: out of blocks of one size and into blocks of another,
whatever the order in which a page holds them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.digest import digest
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.reshard import Span
from kv_transfer.tokens import TokenOrder
from tests.unit.kv_transfer.caches import Cache, geometry, turned

LAYERS, HEADS, CONTENT, ITEM = 3, 2, 6, 2
SIZES = st.sampled_from((8, 16, 24, 32, 64))


def shuffled(block_size: int) -> TokenOrder:
    """An order that no strides describe."""
    places = np.random.default_rng(block_size).permutation(block_size * CONTENT)
    return TokenOrder(places.reshape(block_size, CONTENT), ITEM, shuffled)


def cache_of(
    block_size: int, seed: int, *, layers_inside: bool = False, is_shuffled: bool = False
) -> Cache:
    page = HEADS * block_size * CONTENT * ITEM
    shape = geometry(LAYERS, 12, page, layers_inside=layers_inside, gap=4)
    order = shuffled(block_size) if is_shuffled else turned(block_size, CONTENT, ITEM)
    assert bool(order.stripes) != is_shuffled
    return Cache(shape, seed=seed, order=order)


def cell(cache: Cache, block: int, where: tuple[int, int, int]) -> bytes:
    """A token's bytes at (layer, token of the block, head), by the definition of the order."""
    layer, token, head = where
    order = cache.region.order
    assert order is not None
    page = cache.block(block)[layer]
    part = order.block_size * CONTENT * ITEM
    places = [head * part + int(place) * ITEM for place in order.places[token]]
    return b"".join(page[place : place + ITEM] for place in places)


@settings(deadline=None, max_examples=60)
@given(ours=SIZES, theirs=SIZES, inside=st.booleans(), data=st.data())
def test_tokens_pass_between_blocks_of_any_two_sizes_and_nothing_else_changes(
    ours: int, theirs: int, inside: bool, data: st.DataObject
) -> None:
    dice = random.Random(data.draw(st.integers(0, 99)))
    where_to = {"layers_inside": inside, "is_shuffled": data.draw(st.booleans())}
    source = cache_of(ours, 1, is_shuffled=data.draw(st.booleans()))
    target = cache_of(theirs, 2, **where_to)
    start = data.draw(st.integers(0, 3 * ours))
    count = data.draw(st.integers(1, 4 * ours))
    table = dice.sample(range(12), -(-(start + count) // ours))
    to = dice.sample(range(12), min(12, -(-count // theirs)))
    count = min(count, len(to) * theirs)
    before = {b: target.block(b) for b in range(12)}
    moved = source.region.take(table, Span(start, start + count))
    assert moved.nbytes == target.region.size_bytes(0, count)
    target.region.put(to, count, moved)
    for layer in range(LAYERS):
        for n in range(count):
            block, token = table[(start + n) // ours], (start + n) % ours
            for head in range(HEADS):
                came = cell(target, to[n // theirs], (layer, n % theirs, head))
                assert came == cell(source, block, (layer, token, head))
    assert target.region.digest(to, Span(0, count)) == digest([moved])
    assert target.region.take(to, Span(0, count)) == moved
    assert all(target.block(b) == before[b] for b in range(12) if b not in to)
    last, rest = to[-1], count % theirs
    fresh = cache_of(theirs, 2, **where_to)
    for token in range(rest, theirs if rest else 0):
        for layer in range(LAYERS):
            for head in range(HEADS):
                where = (layer, token, head)
                assert cell(target, last, where) == cell(fresh, last, where)


def test_some_heads_pass_alone() -> None:
    source, target = cache_of(8, 1), cache_of(16, 2)
    before = target.block(3)
    one = source.region.geometry.page_bytes // HEADS
    two = target.region.geometry.page_bytes // HEADS
    data = source.region.narrowed(one, one).take([5, 2], Span(3, 12))
    target.region.narrowed(0, two).put([3], 9, data)
    for layer in range(LAYERS):
        for n in range(9):
            block, token = (5, n + 3) if n < 5 else (2, n - 5)
            assert cell(target, 3, (layer, n, 0)) == cell(source, block, (layer, token, 1))
        assert target.block(3)[layer][two:] == before[layer][two:]


def test_what_does_not_fit_is_refused_before_a_byte_is_written() -> None:
    cache = cache_of(8, 1)
    before = cache.snapshot()
    data = cache.region.take([0, 1], Span(0, 9))
    for ids, tokens in (([0], 9), ([0, 1, 2], 9), ([0, 1], 10), ([0, 12], 9), ([0, -1], 9)):
        with pytest.raises(KvTransferError):
            cache.region.put(ids, tokens, data)
    for ids, span in (([0], Span(0, 9)), ([12], Span(0, 8)), ([-1], Span(0, 8))):
        with pytest.raises(KvTransferError):
            cache.region.take(ids, span)
    assert cache.snapshot() == before


def test_a_cache_whose_order_is_not_known_moves_whole_blocks_alone() -> None:
    region = Cache(geometry(), seed=1).region
    assert region.block_size == 0
    assert region.size_bytes(2) == 2 * region.geometry.block_bytes
    for ask in (lambda: region.size_bytes(1, 4), lambda: region.take([0], Span(0, 1))):
        with pytest.raises(KvTransferError, match="cannot be told apart"):
            ask()


@pytest.mark.parametrize(
    ("places", "item_bytes", "problem"),
    [
        ([[0, 1], [2, 2]], 1, "do not fill its page"),
        ([[0, 1], [2, 4]], 1, "do not fill its page"),
        ([0, 1], 1, "do not fill its page"),
        ([[0, 1], [2, 3]], 3, "elements of 3 bytes"),
    ],
)
def test_an_order_that_is_none_is_refused(
    places: list[object], item_bytes: int, problem: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=problem):
        TokenOrder(np.array(places), item_bytes, lambda size: turned(size, 2))


def test_an_order_that_does_not_fit_the_pages_is_refused() -> None:
    region = Cache(geometry(page=64), seed=1, order=turned(5, 2)).region
    with pytest.raises(KvTransferError, match="5 tokens in 64 bytes of a page"):
        region.take([0], Span(0, 1))
