"""Copies scattered pages from one KV cache to another, and digests them: in C where the extension
was built (_copy.c), else in Python, with the same result."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.layout import runs

try:
    from kv_transfer import _copy as compiled
except ImportError:  # installed where there was no C compiler
    compiled = None  # type: ignore[assignment]

# False where the extension is of an older build, or the processor has not what it needs.
_DIGESTS: bool = getattr(compiled, "DIGESTS", False)
# False where the extension is of an older build, or is not there: Python has no fences of memory.
WORDS: bool = hasattr(compiled, "load_word")
# What the extension digests: whole stripes, and more than the short forms of XXH3 take.
STRIPE_BYTES, MIN_DIGESTED_BYTES = 64, 241


class Pages(NamedTuple):
    """The pages of some blocks, in every layer: they begin at address + layer * layer_stride +
    block * block_stride, in bytes."""

    address: int
    layer_stride: int
    block_stride: int
    block_ids: list[int]


def copy_in_c(to: Pages, source: Pages, num_layers: int, page_bytes: int) -> None:
    """See `copy_pages`. Holds the interpreter lock only for short copies."""
    compiled.copy_pages(*to, *source, num_layers, page_bytes)


def copy_in_python(to: Pages, source: Pages, num_layers: int, page_bytes: int) -> None:
    """See `copy_pages`. A call of memmove, which lets go of the interpreter lock, for each run of
    neighbours."""
    firsts, places, sizes = source.block_ids, to.block_ids, [page_bytes] * len(to.block_ids)
    if to.block_stride == source.block_stride == page_bytes:
        pieces = runs(firsts, places)
        firsts, places = [s for s, _, _ in pieces], [d for _, d, _ in pieces]
        sizes = [count * page_bytes for _, _, count in pieces]
    for layer in range(num_layers):
        target_at = to.address + layer * to.layer_stride
        source_at = source.address + layer * source.layer_stride
        moves = map(
            ctypes.memmove,
            [target_at + block * to.block_stride for block in places],
            [source_at + block * source.block_stride for block in firsts],
            sizes,
        )
        deque(moves, maxlen=0)  # runs through them without a step of Python between


def digests_in_c(num_blocks: int, num_layers: int, page_bytes: int) -> bool:
    """Whether the extension is there and digests so many pages of this size on this processor."""
    if not _DIGESTS or page_bytes % STRIPE_BYTES:
        return False
    return num_blocks * num_layers * page_bytes >= MIN_DIGESTED_BYTES


def digest_in_c(pages: Pages, num_layers: int, page_bytes: int) -> int:
    """XXH3 of the pages, layer by layer, where `digests_in_c`; 64 bits."""
    return compiled.digest_pages(*pages, num_layers, page_bytes)


def copy_digested_in_c(to: Pages, source: Pages, num_layers: int, page_bytes: int) -> int:
    """`copy_pages` and `digest_in_c` of what was copied, in one pass over the source."""
    return compiled.copy_digested(*to, *source, num_layers, page_bytes)


def load_word(address: int) -> int:
    """64 bits of memory that another process may write meanwhile, where WORDS; after all that this
    thread has read before, and before all that it reads after."""
    return compiled.load_word(address)


def store_word(address: int, value: int) -> None:
    """The writer's part of `load_word`: after all that this thread has written before, and before
    all that it writes after."""
    compiled.store_word(address, value)


Copy = Callable[[Pages, Pages, int, int], None]

# Copies `page_bytes` of each page, layer by layer. The caller has checked that all of it is memory:
# nothing is checked here. Pages that overlap give no particular result.
copy_pages: Copy = copy_in_python if compiled is None else copy_in_c
