"""Paged KV to and from a contiguous staging buffer, by torch indexing: the CPU path, and what a GPU
kernel must equal.

Every layout is seen as one view a layer, [blocks, planes, tokens, heads, channels], where a plane
is K or V (MLA has one plane and one head). Staging holds [layer][plane][token][head][channel] of
one piece (kv_transfer/protocol/plan.py), so it knows nothing of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from kv_transfer.errors import KvTransferError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.reshard import Piece, Span


class PageLayout(Enum):
    """The shapes of a layer's KV cache in vLLM."""

    # [blocks, heads, tokens, 2 * channels], K before V in a token's channels. On CPU, attention
    # packs keys inside the page: there kv_transfer/tokens.py takes the place of this.
    BLOCKS_HEADS_TOKENS = "blocks-heads-tokens"
    # [2, blocks, tokens, heads, channels]: FlashAttention.
    PLANES_BLOCKS_TOKENS = "planes-blocks-tokens"
    # [blocks, 2, tokens, heads, channels]: the same with a block's K and V side by side.
    BLOCKS_PLANES_TOKENS = "blocks-planes-tokens"
    # [blocks, tokens, channels]: MLA.
    LATENT = "latent"


_DIMENSIONS = {
    PageLayout.BLOCKS_HEADS_TOKENS: 4,
    PageLayout.PLANES_BLOCKS_TOKENS: 5,
    PageLayout.BLOCKS_PLANES_TOKENS: 5,
    PageLayout.LATENT: 3,
}


def paged(cache: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """One layer's cache as [blocks, planes, tokens, heads, channels], sharing its memory whatever
    its strides. Raises UnsupportedLayout."""
    if cache.dim() != _DIMENSIONS[layout]:
        raise UnsupportedLayout(f"{layout.value} with shape {tuple(cache.shape)}")
    view: torch.Tensor
    match layout:
        case PageLayout.BLOCKS_HEADS_TOKENS:
            if cache.shape[3] % 2:
                raise UnsupportedLayout(f"{layout.value} with shape {tuple(cache.shape)}")
            split = cache.view(*cache.shape[:3], 2, cache.shape[3] // 2)
            view = split.permute(0, 3, 2, 1, 4)
        case PageLayout.PLANES_BLOCKS_TOKENS:
            view = cache.transpose(0, 1)
        case PageLayout.BLOCKS_PLANES_TOKENS:
            view = cache
        case PageLayout.LATENT:
            view = cache[:, None, :, None, :]
    if layout is not PageLayout.LATENT and view.shape[1] != 2:
        raise UnsupportedLayout(f"{layout.value} with shape {tuple(cache.shape)}")
    return view


@dataclass(frozen=True, slots=True)
class RankCache:
    """What one rank holds: its layers and heads of the model, and a view (`paged`) a layer. Checked
    at birth; the memory is the engine's."""

    layers: Span
    heads: Span
    views: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.views) != len(self.layers):
            raise UnsupportedLayout(f"{len(self.views)} caches for {len(self.layers)} layers")
        first = self.views[0]
        if any(v.shape != first.shape or v.dtype != first.dtype for v in self.views):
            raise UnsupportedLayout("the layers' KV caches differ in shape or dtype")
        if first.dim() != 5 or first.shape[3] != len(self.heads):
            raise UnsupportedLayout(f"shape {tuple(first.shape)} for {len(self.heads)} heads")

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.views[0].shape[2])

    def size_bytes(self, piece: Piece) -> int:
        """Of the piece in staging."""
        view = self.views[0]
        token_bytes = int(view.shape[1] * view.shape[4]) * view.element_size()
        return piece.size_bytes(token_bytes)


def gather(cache: RankCache, piece: Piece, block_ids: Sequence[int], staging: torch.Tensor) -> int:
    """Copies the piece into the head of `staging` (bytes); returns how many. `block_ids` are the
    request's blocks from its first token on. Raises KvTransferError, having written nothing."""
    wire, views = checked(cache, piece, block_ids, staging)
    blocks, offsets = _places(cache, piece, block_ids)
    for part, view in zip(wire, views, strict=True):
        # Index tensors around a slice put the tokens first: [tokens, planes, heads, channels].
        part.copy_(view[blocks, :, offsets].transpose(0, 1))
    return cache.size_bytes(piece)


def scatter(cache: RankCache, piece: Piece, block_ids: Sequence[int], staging: torch.Tensor) -> int:
    """Copies the head of `staging` to where the piece belongs, the reverse of `gather`."""
    wire, views = checked(cache, piece, block_ids, staging)
    blocks, offsets = _places(cache, piece, block_ids)
    for part, view in zip(wire, views, strict=True):
        view[blocks, :, offsets] = part.transpose(0, 1)
    return cache.size_bytes(piece)


def checked(
    cache: RankCache, piece: Piece, block_ids: Sequence[int], staging: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Staging as [layers, planes, tokens, heads, channels], and what `selected` gives. Raises
    KvTransferError where the piece, the blocks or the staging are not what they must be."""
    views = selected(cache, piece, block_ids)
    _, planes, _, _, channels = views[0].shape
    size = cache.size_bytes(piece)
    if staging.dtype is not torch.uint8 or staging.dim() != 1 or not staging.is_contiguous():
        raise KvTransferError("staging is no run of bytes")
    if staging.numel() < size:
        raise KvTransferError(f"{size} bytes do not fit a slot of {staging.numel()}")
    shape = (len(piece.layers), planes, len(piece.tokens), len(piece.heads), channels)
    return staging[:size].view(views[0].dtype).view(shape), views


def selected(cache: RankCache, piece: Piece, block_ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The piece's layers and heads as views [blocks, planes, tokens, heads, channels]. Raises
    KvTransferError where the piece or the blocks are not what they must be."""
    heads = piece.heads.within(cache.heads)
    views = tuple(view[:, :, :, heads] for view in cache.views[piece.layers.within(cache.layers)])
    num_blocks, _, block_size, _, _ = views[0].shape
    if piece.tokens.end > len(block_ids) * block_size:
        raise KvTransferError(f"{piece.tokens} is not in {len(block_ids)} blocks of {block_size}")
    if not all(0 <= block < num_blocks for block in block_ids):
        raise KvTransferError("a block id is outside its KV cache")
    if len(set(block_ids)) != len(block_ids):
        raise KvTransferError("a block is named twice")
    return views


def _places(
    cache: RankCache, piece: Piece, block_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's block and place in it."""
    device, block_size = cache.views[0].device, cache.block_size
    table = torch.tensor(block_ids, dtype=torch.int64, device=device)
    tokens = torch.arange(piece.tokens.start, piece.tokens.end, device=device)
    return table[tokens // block_size], tokens % block_size
