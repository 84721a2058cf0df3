"""Run by test_gather_triton.py in a process whose triton interprets its kernels on the CPU: the
kernels against their references, on random pieces. Prints how many it compared."""

from __future__ import annotations

import random
import sys

import torch

from kv_transfer import digest_triton
from kv_transfer import gather as reference
from kv_transfer import gather_triton as kernel
from kv_transfer.device import digest
from kv_transfer.gather import PageLayout, RankCache, paged
from kv_transfer.reshard import Piece, Span

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
BLOCK_SIZES = (8, 16, 24, 64)
POISON = 0xAA


def make(dice: random.Random, layout: PageLayout, dtype: torch.dtype, heads: int) -> RankCache:
    layers, block_size, blocks, channels = (
        3,
        dice.choice(BLOCK_SIZES),
        6,
        dice.choice((5, 6, 8, 12)),
    )
    shape = {
        PageLayout.BLOCKS_HEADS_TOKENS: (blocks, heads, block_size, 2 * channels),
        PageLayout.PLANES_BLOCKS_TOKENS: (2, blocks, block_size, heads, channels),
        PageLayout.BLOCKS_PLANES_TOKENS: (blocks, 2, block_size, heads, channels),
        PageLayout.LATENT: (blocks, block_size, channels),
    }[layout]
    caches = [
        torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
        for _ in range(layers)
    ]
    views = tuple(paged(cache.view(dtype), layout) for cache in caches)
    return RankCache(Span(2, 2 + layers), Span(4, 4 + heads), views)


def part(dice: random.Random, whole: Span) -> Span:
    start = dice.randrange(whole.start, whole.end)
    return Span(start, dice.randrange(start, whole.end) + 1)


def as_bytes(cache: RankCache) -> list[torch.Tensor]:
    return [view.contiguous().view(torch.uint8).clone() for view in cache.views]


def compare(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    layout, dtype = dice.choice(list(PageLayout)), dice.choice(DTYPES)
    heads = 1 if layout is PageLayout.LATENT else dice.choice((1, 2, 3, 50))
    cache = make(dice, layout, dtype, heads)
    table = dice.sample(range(6), 4)
    tokens = part(dice, Span(0, 4 * cache.block_size))
    piece = Piece(0, 0, part(dice, cache.layers), part(dice, cache.heads), tokens)
    size = cache.size_bytes(piece)
    # A slot need not be aligned to more than an element.
    skip = dice.choice((0, 4, 16))
    slots = [torch.full((size + 64,), POISON, dtype=torch.uint8)[skip:] for _ in range(2)]
    assert reference.gather(cache, piece, table, slots[0]) == size
    assert kernel.gather(cache, piece, table, slots[1]) == size
    assert torch.equal(*slots), seed
    digests = [int(how.mixed_sum(cache, piece, table)) for how in (digest, digest_triton)]
    assert digests[0] == digests[1], seed

    incoming = torch.randint(0, 256, (size + 64,), dtype=torch.uint8)[skip:]
    before = [view.clone() for view in cache.views]
    reference.scatter(cache, piece, table, incoming)
    expected = as_bytes(cache)
    for view, old in zip(cache.views, before, strict=True):
        view.copy_(old)
    kernel.scatter(cache, piece, table, incoming)
    for got, wanted in zip(as_bytes(cache), expected, strict=True):
        assert torch.equal(got, wanted), seed


def main() -> int:
    count = int(sys.argv[1])
    for seed in range(count):
        compare(seed)
    sys.stdout.write(f"compared {count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
