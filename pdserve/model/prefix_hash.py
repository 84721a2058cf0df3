"""Chain hashes of prompt blocks, shared by router and workers.

The hash of a block is XXH3 of its token ids (32 bits each, little-endian), seeded by the hash of
the block before it. The first block is seeded by the model, its LoRA adapter, the block size and
the request's cache salt. The hash of a block with placeholder tokens of images also covers their
content hashes and positions. A collision only routes a request to a worker that lacks the KV and
computes it; no token depends on these hashes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from pdserve.model.token_ids import pack as pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# 60 bits instead of 64: Python stores the shorter integer in 32 bytes instead of 48 (heap sizes),
# and routers keep one per cached block.
_MASK = (1 << 60) - 1
_HASH_BYTES = 8
_RUN_BLOCKS = 128
_MOST_RUNS = 8192  # of 1 KiB, and 200 bytes of Python's

MediaKey = tuple[str, int]
"""The content hash of an image, and the position of its first token relative to the block's first
token; negative if it begins in an earlier block. vLLM's key is ("mm", hash, position)."""

NO_MEDIA: Mapping[int, Sequence[MediaKey]] = MappingProxyType({})


@lru_cache(maxsize=1024)
def root(model: str, block_size: int, adapter: str = "", cache_salt: str = "") -> int:
    """Return the seed of the first block. `adapter` is the key of a LoRA adapter.

    The seed does not depend on the version of the weights in the salt: workers with other weights
    get no requests, and report an empty cache after an update.
    """
    if cache_salt.startswith("\0"):
        cache_salt = cache_salt.split("\0", 2)[2]
    parts = (str(block_size), model, adapter, cache_salt)
    return xxh3_64_intdigest("\0".join(parts).encode()) & _MASK


def media_keys(items: Iterable[tuple[str, int, int]], block_size: int) -> dict[int, list[MediaKey]]:
    """Return the images in each block that has any, by the block's index. `items`: content hash,
    offset and length in tokens of each image, in order."""
    found: dict[int, list[MediaKey]] = {}
    for content_hash, offset, length in items:
        for index in range(offset // block_size, -(-(offset + length) // block_size)):
            found.setdefault(index, []).append((content_hash, offset - index * block_size))
    return found


def chain(
    token_ids: Sequence[int],
    block_size: int,
    parent: int,
    *,
    blocks: int | None = None,
    media: Mapping[int, Sequence[MediaKey]] = NO_MEDIA,
) -> list[int]:
    """Return the hashes of the first full blocks of `token_ids`, at most `blocks`. `parent` is the
    hash of the block before them, or the root. `media`: the images in each block, by its index in
    `token_ids`."""
    count = len(token_ids) // block_size
    if blocks is not None:
        count = min(count, blocks)
    if not count:
        return []
    data = pack_ids(token_ids, count * block_size)
    hashes: list[int] = []
    run = 4 * block_size * _RUN_BLOCKS
    for start in range(0, len(data), run):
        part, first = data[start : start + run], len(hashes)
        if len(part) < run or any(first <= x < first + _RUN_BLOCKS for x in media):
            hashes += _hashed(part, block_size, parent, media, first)
        else:
            hashes += _RUNS.hashed(part, block_size, parent)
        parent = hashes[-1]
    return hashes


def _hashed(
    data: memoryview,
    block_size: int,
    parent: int,
    media: Mapping[int, Sequence[MediaKey]] = NO_MEDIA,
    first: int = 0,
) -> list[int]:
    size, hashes = 4 * block_size, []
    for index, start in enumerate(range(0, len(data), size), first):
        content: memoryview | bytes = data[start : start + size]
        if index in media:
            keys = "".join(f"\0{name}\0{position}" for name, position in media[index])
            content = bytes(content) + keys.encode()
        parent = xxh3_64_intdigest(content, parent) & _MASK
        hashes.append(parent)
    return hashes


class _Runs:
    """Hashes of runs of blocks, because each turn of a long conversation begins with the blocks of
    the turn before. May be used by several threads."""

    def __init__(self) -> None:
        self._packed: dict[tuple[bytes, int], bytes] = {}  # oldest first
        self._lock = Lock()

    def hashed(self, data: memoryview, block_size: int, parent: int) -> list[int]:
        key = (xxh3_128_digest(data, parent), block_size)
        packed = self._packed.get(key)
        if packed is not None:
            return unpack(packed)
        hashes = _hashed(data, block_size, parent)
        with self._lock:
            self._packed[key] = pack(hashes)
            if len(self._packed) > _MOST_RUNS:
                del self._packed[next(iter(self._packed))]
        return hashes


_RUNS = _Runs()


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return the number of prompt blocks that an engine can reuse from its cache. It always
    computes the last token, to sample after it (vLLM's KVCacheManager.get_computed_blocks)."""
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
