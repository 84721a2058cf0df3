"""The kernel for kv_transfer/device/digest.py's sum: one launch a chunk, over all its layers.
Imported only where a GPU is used; triton comes with vLLM's GPU build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kv_transfer.device.digest import FIRST, SECOND, STEP
from kv_transfer.gather import RankCache, selected
from kv_transfer.gather_triton import MAX_TILE_ROW, TILE_TOKENS, columns_of, tile_of, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.reshard import Piece

# By their size in bytes.
ELEMENTS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum(words, sums, first_token, num_tokens, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """`words`: each layer's address, then the block table. `sums`: of each program. `SHAPE` ends
    with the mixture's constants and the elements' type."""
    line, tokens, is_token, page = tile_of(words, first_token, num_tokens, SHAPE)
    base = tl.load(words + line // SHAPE[1]).to(tl.pointer_type(SHAPE[14]))
    total = tl.zeros((SHAPE[5], SHAPE[6]), dtype=tl.uint64)
    for start in range(0, SHAPE[4], SHAPE[6]):
        column, inside, mask = columns_of(start, is_token, SHAPE)
        value = tl.load(base + page[:, None] + inside[None, :], mask=mask, other=0).to(tl.uint64)
        place = (line * num_tokens + tokens)[:, None] * SHAPE[4] + column[None, :] + 1
        mixed = value + place.to(tl.uint64) * SHAPE[11]
        mixed = (mixed ^ (mixed >> 30)) * SHAPE[12]
        mixed = (mixed ^ (mixed >> 27)) * SHAPE[13]
        mixed = mixed ^ (mixed >> 31)
        total += tl.where(mask, mixed, 0)
    here = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + here, tl.sum(tl.sum(total, axis=1), axis=0).to(tl.int64))


def mixed_sum(cache: RankCache, piece: Piece, block_ids: Sequence[int]) -> torch.Tensor:
    """As kv_transfer.device.digest.mixed_sum, on the current stream; returns before it is there."""
    views = selected(cache, piece, block_ids)
    first = views[0]
    _, planes, _, heads, channels = first.shape
    layers, tokens, row = len(views), len(piece.tokens), heads * channels
    item = first.element_size()
    grid = (triton.cdiv(tokens, TILE_TOKENS), layers * planes)
    sums = torch.empty(grid[0] * grid[1], dtype=torch.int64, device=first.device)
    _sum[grid](
        words_of(views, block_ids),
        sums,
        piece.tokens.start,
        tokens,
        SHAPE=(
            *(layers, planes, cache.block_size, channels, row, TILE_TOKENS),
            min(MAX_TILE_ROW, triton.next_power_of_2(row)),
            *first.stride()[:4],
            *(STEP, FIRST, SECOND, ELEMENTS[item]),
        ),
    )
    return sums.sum()
