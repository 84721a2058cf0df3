"""Digests of KV on its way: the source's over what it sends, the target's over what lies in its
own memory then. What differs was damaged by copy, mapping, network or memory.

xxh3 is quick and not a signature: it finds accidents, not forgeries. It depends on the bytes alone,
not on the pieces they come in, so the two ends may cut their memory differently, and one may
compute it in C (_copy.c) and the other not. KV in GPU memory has digests of another kind, made by
the GPU (device/digest.py). Where a push digests what it copies, over shm and where tokens move, a
change of the source's memory under the copy is not found: the digest is of what was copied. What a
target takes by itself is compared with a digest of when prefill ended, not in place: taking.py.
"""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer.memory import KvRegion
    from kv_transfer.source_actions import PushChunk

# Where chunks are sampled, every one of so many gets a digest.
SAMPLED_EVERY = 16
NO_DIGEST = 0
# Of a chunk on its way to a channel that makes the digest as it copies. Never on the wire.
DIGEST_DUE = -1


class DigestMode(StrEnum):
    """Which chunks a source sends with a digest. A target checks each that it gets."""

    # All of KV in host memory. Of KV on a GPU so many as with SAMPLED: what they cost there has
    # not been measured.
    AUTO = "auto"
    ALWAYS = "always"
    SAMPLED = "sampled"
    OFF = "off"


def digest(pieces: Iterable[memoryview]) -> int:
    """64 bits of the bytes of `pieces` in order; never NO_DIGEST."""
    state = xxhash.xxh3_64()
    update = state.update
    for piece in pieces:
        update(piece)
    return state.intdigest() or 1


class Sampler:
    """Says, chunk by chunk, whether a source makes a digest, and makes it."""

    def __init__(self, mode: DigestMode) -> None:
        self._mode = mode
        self._chunks = itertools.count()

    def takes(self, *, suspect: bool, is_host: bool = True) -> bool:
        """For the next chunk; one of a transfer that was damaged before is always taken."""
        match self._mode:
            case DigestMode.ALWAYS:
                return True
            case DigestMode.AUTO if is_host:
                return True
            case DigestMode.SAMPLED | DigestMode.AUTO:
                return next(self._chunks) % SAMPLED_EVERY == 0 or suspect
            case DigestMode.OFF:
                return suspect

    def mark(self, chunk: PushChunk[Any], region: KvRegion, *, in_push: bool) -> int:
        """What the chunk is sent with: the digest of what moves, which lies in `region`, if it is
        its turn. DIGEST_DUE where the push makes it: of tokens in host memory, and `in_push`."""
        if not self.takes(suspect=chunk.suspect, is_host=region.is_host):
            return NO_DIGEST
        if region.is_host and (in_push or chunk.tokens):
            return DIGEST_DUE
        return region.digest(chunk.source_ids, chunk.span())
