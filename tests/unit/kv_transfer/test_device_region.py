"""A KV cache of a GPU's layouts, in host memory: blocks leave and arrive whole, in one form."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch

from kv_transfer.device.region import DeviceRegion, device_region
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.gather import gather, scatter
from kv_transfer.reshard import Span
from kv_transfer.transport.base import LocalKv
from kv_transfer.transport.tcp import TcpTransport

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 4, 8, 10
# vLLM's names: the order of layers, blocks, heads, tokens and content in memory.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
POISON = 0x5A


def caches(layout: str, *, seed: int | None = None, split: int = 1) -> list[torch.Tensor]:
    """[blocks, heads, tokens, content] a layer; random bytes, or poison without a seed."""
    sizes = dict(
        zip("LBHNC", (LAYERS, BLOCKS * split, HEADS, TOKENS // split, CONTENT), strict=True)
    )
    shape = [sizes[letter] for letter in layout]
    if seed is None:
        memory = torch.full(shape, POISON, dtype=torch.int16)
    else:
        dice = torch.Generator().manual_seed(seed)
        memory = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=dice)
    return list(memory.permute(*(layout.index(letter) for letter in "LBHNC")))


def move(source: DeviceRegion, target: DeviceRegion, table: list[int], to: list[int]) -> None:
    staging = torch.zeros(len(table) * source.geometry.block_bytes + 3, dtype=torch.uint8)
    piece, places = source.piece(table)
    assert gather(source.cache, piece, places, staging) == staging.numel() - 3
    piece, places = target.piece(to)
    scatter(target.cache, piece, places, staging)


@pytest.mark.parametrize(("ours", "theirs"), [*permutations(LAYOUTS, 2), ("LBNHC", "LBNHC")])
def test_blocks_pass_between_any_two_layouts(ours: str, theirs: str) -> None:
    dice = random.Random(f"{ours}{theirs}")
    source, target = caches(ours, seed=1), caches(theirs)
    table, to = dice.sample(range(BLOCKS), 3), dice.sample(range(BLOCKS), 3)
    move(device_region(source, BLOCKS), device_region(target, BLOCKS), table, to)
    for old, new in zip(source, target, strict=True):
        assert torch.equal(new[to], old[table])
        untouched = [block for block in range(BLOCKS) if block not in to]
        assert (new[untouched] == POISON).all()


def test_a_block_may_be_several_of_the_kernels() -> None:
    """Only one end's kernels split it: a token's place in the engine's block is the same."""
    source, target = caches("LBNHC", seed=2, split=2), caches("LBHNC")
    region = device_region(source, BLOCKS)
    assert region.geometry.num_blocks == BLOCKS
    assert region.geometry.page_bytes == device_region(target, BLOCKS).geometry.page_bytes
    move(region, device_region(target, BLOCKS), [5, 0], [1, 2])
    for old, new in zip(source, target, strict=True):
        halves = old.unflatten(0, (BLOCKS, 2)).transpose(1, 2).flatten(2, 3)
        assert torch.equal(new[[1, 2]], halves[[5, 0]])


def test_some_tokens_of_the_blocks_pass_alone() -> None:
    """Into blocks of other sizes, split or not: what comes before and behind stays."""
    source, target = caches("LBNHC", seed=4, split=2), caches("BLHNC")
    ours, theirs = device_region(source, BLOCKS), device_region(target, BLOCKS)
    assert ours.block_size == theirs.block_size == TOKENS
    staging = torch.zeros(ours.size_bytes(0, 9), dtype=torch.uint8)
    gather(ours.cache, *ours.piece([5, 0], Span(5, 14)), staging)
    scatter(theirs.cache, *theirs.piece([1, 2], Span(0, 9)), staging)
    for old, new in zip(source, target, strict=True):
        whole = old.unflatten(0, (BLOCKS, 2)).transpose(1, 2).flatten(2, 3)
        came = torch.cat([whole[5], whole[0]], dim=1)[:, 5:14]
        assert torch.equal(torch.cat([new[1], new[2]], dim=1)[:, :9], came)
        new[1], new[2, :, 0] = POISON, POISON
        assert (new == POISON).all()
    with pytest.raises(KvTransferError, match="is not in 2 blocks"):
        ours.piece([5, 0], Span(5, 2 * TOKENS + 1))


def test_some_heads_of_each_block_pass_alone() -> None:
    source, target = caches("LBNHC", seed=3), caches("BLHNC")
    whole = device_region(source, BLOCKS)
    head = whole.geometry.page_bytes // HEADS
    move(
        whole.narrowed(head, 2 * head),
        device_region(target, BLOCKS).narrowed(2 * head, 2 * head),
        [3],
        [4],
    )
    for old, new in zip(source, target, strict=True):
        assert torch.equal(new[4, 2:], old[3, 1:3])
        assert (new[4, :2] == POISON).all()
    # A part of a part.
    assert whole.narrowed(head, 2 * head).narrowed(head, head).heads.start == 2


@pytest.mark.parametrize(("start", "size"), [(0, 1), (1, 160), (0, 0), (480, 320), (160, 640)])
def test_what_is_no_head_of_a_page_is_refused(start: int, size: int) -> None:
    with pytest.raises(KvTransferError, match="no heads of a page"):
        device_region(caches("LBNHC"), BLOCKS).narrowed(start, size)


@pytest.mark.parametrize("ids", [[BLOCKS], [-1], [0, 2**40]])
def test_a_block_outside_the_cache_is_refused(ids: list[int]) -> None:
    with pytest.raises(KvTransferError, match="outside its KV cache"):
        device_region(caches("LBNHC"), BLOCKS).piece(ids)


@pytest.mark.parametrize(
    ("tensors", "blocks", "reason"),
    [
        ([torch.zeros(4, 2, 8)], 4, "shape"),
        ([torch.zeros(4, 1, 8, 6).transpose(2, 3)], 4, "shape"),
        ([torch.zeros(4, 1, 8, 6), torch.zeros(4, 1, 8, 7)], 4, "differ"),
        ([torch.zeros(4, 1, 8, 6)], 3, "4 blocks where the scheduler has 3"),
        ([torch.zeros(4, 1, 8, 6)], 8, "4 blocks where the scheduler has 8"),
    ],
)
def test_a_layout_that_is_none_of_these_is_refused(
    tensors: list[torch.Tensor], blocks: int, reason: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        device_region(tensors, blocks)


def test_the_cpu_does_not_reach_into_it() -> None:
    region = device_region(caches("LBNHC"), BLOCKS)
    assert not region.is_host
    assert TcpTransport().offer(LocalKv(region, None), 1) is None
    with pytest.raises(KvTransferError, match="GPU memory"):
        region.pages([0])
    with pytest.raises(KvTransferError, match="GPU memory"):
        region.copy_from(region, [0], [0])
    region.computed()
    assert region.computed_event is None
