"""The kernel for `gather` and `scatter` of kv_transfer/gather.py: one launch a piece, over all its
layers. Imported only where a GPU is used; triton comes with vLLM's GPU build.

Bytes are moved as the widest integers that addresses, strides and heads allow, so that no bit
pattern is special and a head takes few loads. Every offset into a cache is 64 bits wide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kv_transfer.errors import UnsupportedLayout
from kv_transfer.gather import RankCache, checked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.reshard import Piece

# A program moves this many tokens, and of each as many elements at a time.
TILE_TOKENS = 8
MAX_TILE_ROW = 1024
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# A kernel's `SHAPE` begins with what a layout fixes; the compiler knows it, and can load and
# store whole vectors: layers, planes, block size, channels, elements of a row (a token's in one
# layer and plane), TILE_TOKENS, elements of a row that are taken at a time, and the strides of
# block, plane, token and head. What is a kernel's own comes after.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def tile_of(words, first_token, num_tokens, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Of this program: its layer and plane, its tokens, which of them there are, and where the row
    of each begins in its layer."""
    num_layers: tl.constexpr = SHAPE[0]
    planes: tl.constexpr = SHAPE[1]
    block_size: tl.constexpr = SHAPE[2]
    tile_tokens: tl.constexpr = SHAPE[5]
    stride_block: tl.constexpr = SHAPE[7]
    stride_plane: tl.constexpr = SHAPE[8]
    stride_token: tl.constexpr = SHAPE[9]
    tokens = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    line = tl.program_id(1).to(tl.int64)  # layer and plane
    is_token = tokens < num_tokens
    token = first_token + tokens
    block = tl.load(words + num_layers + token // block_size, mask=is_token, other=0)
    page = block * stride_block + line % planes * stride_plane
    page += (token % block_size).to(tl.int64) * stride_token
    return line, tokens, is_token, page


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def columns_of(start, is_token, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """The columns of a row from `start` on, where they are in it, and which elements there are."""
    channels: tl.constexpr = SHAPE[3]
    row: tl.constexpr = SHAPE[4]
    tile_row: tl.constexpr = SHAPE[6]
    stride_head: tl.constexpr = SHAPE[10]
    column = start + tl.arange(0, tile_row)
    inside = (column // channels).to(tl.int64) * stride_head
    inside += column % channels
    return column, inside, is_token[:, None] & (column < row)[None, :]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move(words, wire, first_token, num_tokens, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """`words`: each layer's address, then the block table. `SHAPE` ends with the direction."""
    line, tokens, is_token, page = tile_of(words, first_token, num_tokens, SHAPE)
    base = tl.load(words + line // SHAPE[1]).to(wire.dtype)
    for start in range(0, SHAPE[4], SHAPE[6]):
        column, inside, mask = columns_of(start, is_token, SHAPE)
        in_cache = base + page[:, None] + inside[None, :]
        in_wire = wire + (line * num_tokens + tokens)[:, None] * SHAPE[4] + column[None, :]
        if SHAPE[11]:
            tl.store(in_cache, tl.load(in_wire, mask=mask), mask=mask)
        else:
            tl.store(in_wire, tl.load(in_cache, mask=mask), mask=mask)


def gather(cache: RankCache, piece: Piece, block_ids: Sequence[int], staging: torch.Tensor) -> int:
    """As kv_transfer.gather.gather, on the current stream; returns before the bytes are there."""
    return _launch(cache, piece, block_ids, staging, is_scatter=False)


def scatter(cache: RankCache, piece: Piece, block_ids: Sequence[int], staging: torch.Tensor) -> int:
    """As kv_transfer.gather.scatter, on the current stream; returns before the bytes are there."""
    return _launch(cache, piece, block_ids, staging, is_scatter=True)


def words_of(views: Sequence[torch.Tensor], block_ids: Sequence[int]) -> torch.Tensor:
    """What a kernel of ours reads first: each layer's address, then the block table. Raises
    UnsupportedLayout where the layers do not lie alike."""
    first = views[0]
    if any(view.stride() != first.stride() for view in views) or first.stride(4) != 1:
        raise UnsupportedLayout("layers of different strides, or channels that are not in a row")
    words = [*(view.data_ptr() for view in views), *block_ids]
    return torch.tensor(words, dtype=torch.int64, device=first.device)


def _launch(
    cache: RankCache,
    piece: Piece,
    block_ids: Sequence[int],
    staging: torch.Tensor,
    *,
    is_scatter: bool,
) -> int:
    wire, views = checked(cache, piece, block_ids, staging)
    first, size = views[0], cache.size_bytes(piece)
    table = words_of(views, block_ids)
    layers, planes, tokens, heads, channels = wire.shape
    item = first.element_size()
    addresses = [view.data_ptr() for view in views]
    strides = [stride * item for stride in first.stride()[:4]]
    ours = (staging.data_ptr(), staging.storage_offset(), size)
    unit = math.gcd(max(_INTEGERS), channels * item, *strides, *addresses, *ours)
    channels_in_units = channels * item // unit
    row = heads * channels_in_units
    _move[triton.cdiv(tokens, TILE_TOKENS), layers * planes](
        table,
        staging[:size].view(_INTEGERS[unit]),
        piece.tokens.start,
        tokens,
        SHAPE=(
            layers,
            planes,
            cache.block_size,
            channels_in_units,
            row,
            TILE_TOKENS,
            min(MAX_TILE_ROW, triton.next_power_of_2(row)),
            *(stride // unit for stride in strides),
            is_scatter,
        ),
    )
    return size
