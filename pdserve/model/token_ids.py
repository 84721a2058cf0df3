"""Token ids of long prompts, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np

_BYTES = 4


class TokenIds(Sequence[int]):
    """Token ids in the two formats in which they are hashed and sent. As Python integers, a prompt
    of 50,000 tokens would take 1.8 MB, and each pass over it a millisecond.

    `packed`: 32 bits each, little-endian. `varints`: as in a packed field of protobuf. Equal to a
    tuple of the same ids.
    """

    __slots__ = ("packed", "varints")

    def __init__(self, packed: bytes, varints: bytes) -> None:
        self.packed, self.varints = packed, varints

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """Return these ids, which fit in 32 bits."""
        if isinstance(ids, TokenIds):
            return ids
        packed = bytes(pack(ids, len(ids)))
        return cls(packed, _varints(packed))

    @classmethod
    def joined(cls, parts: Iterable[TokenIds]) -> TokenIds:
        each = list(parts)
        return cls(b"".join([x.packed for x in each]), b"".join([x.varints for x in each]))

    @property
    def largest(self) -> int:
        """The largest id, or -1 if there are none."""
        return int(_array(self.packed).max()) if self.packed else -1

    def __len__(self) -> int:
        return len(self.packed) // _BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        found = self._memory[index]
        return found if isinstance(found, int) else tuple(found.tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self._memory.tolist())

    @property
    def _memory(self) -> memoryview[int]:
        return memoryview(self.packed).cast("I")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} token ids>"


def pack(ids: Sequence[int], count: int) -> memoryview:
    """Return the first `count` ids, 32 bits each, little-endian."""
    if isinstance(ids, TokenIds):
        return memoryview(ids.packed)[: count * _BYTES]
    return memoryview(struct.pack(f"<{count}I", *ids[:count]))


def _array(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    import numpy as np

    return np.frombuffer(packed, "<u4")


def _varints(packed: bytes) -> bytes:
    if not packed:
        return b""
    import numpy as np

    ids = _array(packed)
    width = max(1, -(-int(ids.max()).bit_length() // 7))
    found, kept = np.empty((len(ids), width), "u1"), np.ones((len(ids), width), bool)
    for place in range(width):
        rest = ids >> (7 * place)
        found[:, place] = rest & 0x7F
        found[:, place] |= (rest > 0x7F).view("u1") << 7  # another byte follows
        if place:
            kept[:, place] = rest > 0
    return bytes(found[kept])
