"""A KV cache in GPU memory, as vLLM 0.32 lays it out.

Every layer's cache is logically [blocks, heads, tokens, content], where content is K and V of one
head and token side by side (or MLA's latent, with one head). The six physical layouts of
vllm/v1/kv_cache_layout.py (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC) are strides of that view, and
so is a block that the kernels see as several smaller ones. Blocks leave and arrive in one form,
[layer][token][head][content], so the two ends need not have the same layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_transfer.digest import NO_DIGEST
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.gather import RankCache
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion
from kv_transfer.reshard import Piece, Span

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceRegion(KvRegion):
    """The blocks of a KV cache in GPU memory, or some heads of each. Its geometry counts bytes and
    says nothing of addresses: only kernels reach them. `views`: [blocks, heads, tokens, content] a
    layer, where `split` blocks of theirs are one of the engine's."""

    is_host = False

    def __init__(
        self, views: Sequence[torch.Tensor], split: int = 1, heads: Span | None = None
    ) -> None:
        first = views[0]
        if any(view.dim() != 4 for view in views):
            raise UnsupportedLayout(f"a layer's KV cache has the shape {tuple(first.shape)}")
        blocks, num_heads, tokens, content = first.shape
        paged = tuple(view.permute(0, 2, 1, 3)[:, None] for view in views)
        self.views = tuple(views)
        self.split = split
        self.heads = heads or Span(0, num_heads)
        self.cache = RankCache(Span(0, len(paged)), Span(0, num_heads), paged)
        self._head_bytes = split * tokens * content * first.element_size()
        page_bytes = len(self.heads) * self._head_bytes
        self.geometry = KvGeometry(
            len(paged), blocks // split, page_bytes, blocks // split * page_bytes, page_bytes
        )
        self.computed_event: torch.cuda.Event | None = None

    @property
    def block_size(self) -> int:
        return self.split * self.cache.block_size

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.views[0].device

    def narrowed(self, start: int, size: int) -> DeviceRegion:
        """See KvRegion; a part is whole heads. It sees what `computed` has noted so far."""
        (first, rest), (count, more) = (divmod(n, self._head_bytes) for n in (start, size))
        if rest or more or not 0 < count <= len(self.heads) - first:
            raise KvTransferError(f"[{start}, {start + size}) are no heads of a page")
        begin = self.heads.start + first
        cut = DeviceRegion(self.views, self.split, Span(begin, begin + count))
        cut.computed_event = self.computed_event
        return cut

    def computed(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.computed_event = event

    def piece(
        self, block_ids: Sequence[int], tokens: Span | None = None
    ) -> tuple[Piece, list[int]]:
        """The blocks as a piece, and their table, as gather and scatter take them; or some tokens
        of the blocks, counted from the first block's first. Raises KvTransferError where an id is
        no block, or none is given, or the blocks have no such tokens."""
        if not self.geometry.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        table = [block * self.split + n for block in block_ids for n in range(self.split)]
        size = self.cache.block_size
        if tokens is None:
            tokens = Span(0, len(table) * size)
        first, end = tokens.start // size, -(-tokens.end // size)
        if end > len(table):
            raise KvTransferError(f"{tokens} is not in {len(block_ids)} blocks")
        inside = Span(tokens.start - first * size, tokens.end - first * size)
        return Piece(0, 0, self.cache.layers, self.heads, inside), table[first:end]

    def pages(self, block_ids: Sequence[int]) -> list[memoryview]:
        raise KvTransferError("the KV cache is in GPU memory")

    def copy_from(
        self, source: KvRegion, source_ids: list[int], own_ids: list[int], digests: bool = False
    ) -> int:
        raise KvTransferError("the KV cache is in GPU memory")

    def take(self, block_ids: Sequence[int], tokens: Span) -> memoryview:
        raise KvTransferError("the KV cache is in GPU memory")

    def put(self, block_ids: Sequence[int], tokens: int, data: memoryview) -> None:
        raise KvTransferError("the KV cache is in GPU memory")

    def digest(self, block_ids: list[int], tokens: Span | None = None) -> int:
        """Return NO_DIGEST: KV in GPU memory travels without digests. HBM has ECC, NVLink and
        network cards check every packet, and reading each chunk back to the CPU would cost more
        than the transfer."""
        return NO_DIGEST


def device_region(caches: Sequence[torch.Tensor], num_blocks: int) -> DeviceRegion:
    """The KV cache that vLLM registered, of which its scheduler counts `num_blocks` blocks. Raises
    UnsupportedLayout."""
    first = caches[0]
    if any(cache.shape != first.shape or cache.dtype != first.dtype for cache in caches):
        raise UnsupportedLayout("the layers' KV caches differ in shape or dtype")
    if first.dim() != 4 or first.stride(3) != 1:
        raise UnsupportedLayout(f"a layer's KV cache has the shape {tuple(first.shape)}")
    split, rest = divmod(first.shape[0], num_blocks)
    if rest or not split:
        raise UnsupportedLayout(f"{first.shape[0]} blocks where the scheduler has {num_blocks}")
    return DeviceRegion(caches, split)
