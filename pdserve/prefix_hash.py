"""Chain hashes: one number for a block of a prompt and all that comes before it.

Router and workers must make the same ones, so they are made here alone. A block's hash is XXH3 of
its token ids (32 bits each, little-endian), seeded by the hash of the block before it; the first is
seeded by the model and the block size. Blocks that hold the same tokens behind different ones have
different hashes. Two prompts could share a hash by chance or by design; then a request is placed
for KV that is not there, and computed as ever: no token depends on these hashes.
"""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# An integer of 60 bits takes Python 32 bytes, one of 64 bits 48; there may be millions.
_MASK = (1 << 60) - 1
_HASH_BYTES = 8


@lru_cache(maxsize=1024)
def root(model: str, block_size: int) -> int:
    """What the first block of every prompt is seeded by."""
    return xxh3_64_intdigest(f"{block_size}/{model}".encode()) & _MASK


def chain(
    token_ids: Sequence[int], block_size: int, parent: int, *, blocks: int | None = None
) -> list[int]:
    """The hashes of the first `blocks` full blocks (all, without it) of `token_ids`, the first of
    which stands behind `parent`."""
    count = len(token_ids) // block_size
    if blocks is not None:
        count = min(count, blocks)
    if not count:
        return []
    words = array("I", token_ids[: count * block_size])
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words).cast("B")
    size = block_size * words.itemsize
    hashes = []
    for start in range(0, count * size, size):
        parent = xxh3_64_intdigest(data[start : start + size], parent) & _MASK
        hashes.append(parent)
    return hashes


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that an engine can take from its cache: not those up to the last token,
    which it must compute to sample after it (vLLM's KVCacheManager.get_computed_blocks)."""
    return max(0, prompt_tokens - 1) // block_size


def pack(hashes: Iterable[int]) -> bytes:
    """As they travel: 8 bytes each, little-endian."""
    words = array("Q", hashes)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack(data: bytes) -> list[int]:
    """What `pack` packed. Raises ValueError where it is none."""
    return words(data).tolist()


def words(data: bytes) -> array[int]:
    """As `unpack`, in 8 bytes each."""
    if len(data) % _HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of hashes")
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found
