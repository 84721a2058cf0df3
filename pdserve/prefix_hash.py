"""Chain hashes of prompt blocks, shared by router and workers.

The hash of a block is XXH3 of its token ids (32 bits each, little-endian), seeded by the hash of
the block before it. The first block is seeded by the model, its LoRA adapter, the block size and
the request's cache salt. A collision only sends a request to a worker that lacks the KV and
computes it: no token depends on these hashes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Python stores an integer of 60 bits in 32 bytes, one of 64 bits in 48.
_MASK = (1 << 60) - 1
_HASH_BYTES = 8


@lru_cache(maxsize=1024)
def root(model: str, block_size: int, adapter: str = "", cache_salt: str = "") -> int:
    """Return the seed of the first block. `adapter` is the key of a LoRA adapter."""
    parts = (str(block_size), model, adapter, cache_salt)
    return xxh3_64_intdigest("\0".join(parts).encode()) & _MASK


def chain(
    token_ids: Sequence[int], block_size: int, parent: int, *, blocks: int | None = None
) -> list[int]:
    """Return the hashes of the full blocks of `token_ids`, at most `blocks`, the first of which
    follows `parent`."""
    count = len(token_ids) // block_size
    if blocks is not None:
        count = min(count, blocks)
    if not count:
        return []
    size = 4 * block_size
    data = memoryview(struct.pack(f"<{count * block_size}I", *token_ids[: count * block_size]))
    hashes = []
    for start in range(0, count * size, size):
        parent = xxh3_64_intdigest(data[start : start + size], parent) & _MASK
        hashes.append(parent)
    return hashes


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt an engine can take from its cache. It computes the last
    token in any case, to sample after it (vLLM's KVCacheManager.get_computed_blocks)."""
    return max(0, prompt_tokens - 1) // block_size


def pack(hashes: Iterable[int]) -> bytes:
    """Return the hashes as bytes: 8 each, little-endian."""
    known = tuple(hashes)
    return struct.pack(f"<{len(known)}Q", *known)


def unpack(data: bytes) -> list[int]:
    """Return the hashes that `pack` packed. Raises ValueError."""
    if len(data) % _HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of hashes")
    return list(struct.unpack(f"<{len(data) // _HASH_BYTES}Q", data))
