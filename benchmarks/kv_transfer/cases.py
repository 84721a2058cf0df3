"""What is moved: so many blocks of such a size, scattered over both caches."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.errors import BenchError
from kv_transfer.layout import KvGeometry

# Of each block: in the source's cache, in the target's, and in the memory that memcpy writes to;
# and in two caches of each peer.
COPIES, PEER_COPIES = 3, 2


@dataclass(frozen=True, slots=True)
class Case:
    """`count` blocks of `block_bytes` over all layers."""

    count: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """What one transfer moves."""
        return self.count * self.block_bytes


@dataclass(frozen=True, slots=True)
class Trip:
    """One transfer of a case. `number` is never used twice by a way."""

    number: int
    source_ids: list[int]
    target_ids: list[int]


def geometry(block_bytes: int, layers: int, cache_bytes: int) -> KvGeometry:
    """A cache full of such blocks, layer after layer, as vLLM lays it out. Raises BenchError."""
    page_bytes, rest = divmod(block_bytes, layers)
    num_blocks = cache_bytes // block_bytes
    if rest or page_bytes % 8:
        raise BenchError(f"{block_bytes} bytes cannot be cut into {layers} pages of whole words")
    return KvGeometry(layers, num_blocks, page_bytes, num_blocks * page_bytes, page_bytes)


def trip(case: Case, num_blocks: int, number: int) -> Trip:
    """Scattered blocks, others for every number, and the same in every run."""
    chance = random.Random(f"{case.count} {case.block_bytes} {number}")
    blocks = range(num_blocks)
    return Trip(number, chance.sample(blocks, case.count), chance.sample(blocks, case.count))
