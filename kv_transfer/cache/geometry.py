"""The memory layout of a worker's KV cache, and the key of its compatibility with others.

Tested with vLLM 0.32.0 on a CPU: one allocation for all layers, each layer a view [blocks, heads,
tokens, channels], each (layer, block) page contiguous. The CPU attention kernels pack the keys of a
page by instruction set. Instruction set and block size are therefore part of the compatibility key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Sizes and strides of a KV cache, in bytes.

    A page holds one block of one layer. It starts at base + offset + layer * layer_stride + block *
    block_stride and is `page_bytes` long.
    """

    num_layers: int
    num_blocks: int
    page_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int
    offset_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.page_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from the base to the end of the last page."""
        return (
            self.offset_bytes
            + (self.num_layers - 1) * self.layer_stride_bytes
            + (self.num_blocks - 1) * self.block_stride_bytes
            + self.page_bytes
        )

    def has_blocks(self, block_ids: Sequence[int]) -> bool:
        return not block_ids or (min(block_ids) >= 0 and max(block_ids) < self.num_blocks)

    def page_offset(self, layer: int, block: int) -> int:
        return self.offset_bytes + layer * self.layer_stride_bytes + block * self.block_stride_bytes

    def narrowed(self, layers: range, start: int, size: int) -> KvGeometry:
        """Return the same blocks in some of the layers, with each page cut to `size` bytes from
        `start`. Raises KvTransferError if the cache lacks these layers, or pages these bytes."""
        if not 0 <= layers.start < layers.stop <= self.num_layers:
            raise KvTransferError(f"layers {layers.start} to {layers.stop} of {self.num_layers}")
        if start < 0 or size <= 0 or start + size > self.page_bytes:
            raise KvTransferError(
                f"bytes {start} to {start + size} of a page of {self.page_bytes} bytes"
            )
        moved = layers.start * self.layer_stride_bytes + start
        offset = self.offset_bytes + moved
        return replace(self, num_layers=len(layers), page_bytes=size, offset_bytes=offset)

    def to_list(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_list(cls, values: list[int]) -> KvGeometry:
        """Build a geometry from the result of `to_list`. Raises ValueError."""
        if len(values) != 6 or not all(type(v) is int and v >= 0 for v in values):
            raise ValueError("a geometry is six non-negative integers")
        geometry = cls(*values)
        if not (geometry.num_layers and geometry.num_blocks and geometry.page_bytes):
            raise ValueError("a geometry has at least one layer, block and byte")
        return geometry


class GroupKind(StrEnum):
    """The past tokens that the next token attends to."""

    FULL = "full"  # all tokens
    WINDOW = "window"  # the last `reach` tokens
    CHUNK = "chunk"  # the tokens since the last multiple of `reach`
    STATE = "state"  # one state that each token overwrites


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a page layout and the engine's block table number `table`.

    `reach` is the length of a chunk, or of a window without the next token.
    """

    table: int
    block_size: int
    kind: GroupKind = GroupKind.FULL
    reach: int = 0

    @property
    def is_streamed(self) -> bool:
        """Return True if every full block is final and needed, so that it can be sent during
        prefill. For other kinds, the needed blocks are known only when prefill has ended.
        """
        return self.kind is GroupKind.FULL

    def needed(self, num_tokens: int) -> range:
        """Return the block-table indices that the token after the first `num_tokens` needs.

        Matches `get_num_skipped_tokens` of vLLM's KV-cache managers.
        """
        skipped = 0
        match self.kind:
            case GroupKind.WINDOW:
                skipped = max(0, num_tokens - self.reach)
            case GroupKind.CHUNK:
                skipped = num_tokens - num_tokens % self.reach
            case GroupKind.STATE:
                skipped = num_tokens - 1
        return range(skipped // self.block_size, -(-num_tokens // self.block_size))


@dataclass(frozen=True, slots=True)
class PagePart:
    """The byte range to copy in some pages of a group: `size` bytes from `source_start` in the
    producer's page to `target_start` in the consumer's page. The pages may differ in length.

    `layers` layers are copied, from index `source_layer` at the producer to index `target_layer` at
    the consumer.
    """

    group: int
    source_start: int
    target_start: int
    size: int
    source_layer: int
    target_layer: int
    layers: int

    @property
    def source_layers(self) -> range:
        return range(self.source_layer, self.source_layer + self.layers)

    @property
    def target_layers(self) -> range:
        return range(self.target_layer, self.target_layer + self.layers)

    def at_source(self) -> PagePart:
        """Return the part without its place at the consumer."""
        return PagePart(
            self.group, self.source_start, 0, self.size, self.source_layer, 0, self.layers
        )


def compatibility(layout: Mapping[str, str]) -> str:
    """Return a key that is equal on all workers that can exchange KV. `layout` holds everything
    that determines the meaning of the bytes: model, dtype, heads, packing, versions, block size."""
    text = json.dumps(sorted(layout.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
