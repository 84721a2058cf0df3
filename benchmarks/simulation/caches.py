"""The workers' prefix caches, and the router's lookup of them, which here knows them as they are.

A block is one of the trace's, named by its id; two prompts share as long a prefix as their ids
agree, as the traces have it. Each worker forgets the blocks that it used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.placement.values import Demand


class PrefixCaches:
    """State: the blocks of each worker, oldest first, and who has which as bits of one integer.
    `prefixes` are the ids of requests that may be asked for, by request id."""

    def __init__(self, block_tokens: int, capacities: Mapping[str, int]) -> None:
        self.prefixes: dict[str, Sequence[int]] = {}
        self._block_tokens = block_tokens
        self._names = list(capacities)
        self._bits = {name: 1 << place for place, name in enumerate(self._names)}
        self._most = {name: tokens // block_tokens for name, tokens in capacities.items()}
        self._blocks: dict[str, OrderedDict[int, None]] = {x: OrderedDict() for x in self._names}
        self._holders: dict[int, int] = {}

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """As router/placement/context.py's PrefixLookup has it."""
        found: dict[str, int] = {}
        having = -1
        prefix = self.prefixes.get(demand.request_id, ())
        for length, block in enumerate(prefix):
            here = self._holders.get(block, 0)
            if length:
                self._note(found, having & ~here, length, demand.prompt_tokens)
            having &= here
            if not having:
                return found
        if prefix:
            self._note(found, having, len(prefix), demand.prompt_tokens)
        return found

    def _note(self, found: dict[str, int], bits: int, length: int, prompt_tokens: int) -> None:
        tokens = self._usable(length, prompt_tokens)
        while bits:
            lowest = bits & -bits
            found[self._names[lowest.bit_length() - 1]] = tokens
            bits ^= lowest

    def _usable(self, length: int, prompt_tokens: int) -> int:
        """The last token is computed in any case."""
        return min(length * self._block_tokens, prompt_tokens - 1)

    def hit(self, worker: str, prefix: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that a worker has."""
        blocks, length = self._blocks[worker], 0
        for block in prefix:
            if block not in blocks:
                break
            length += 1
        return self._usable(length, prompt_tokens) if length else 0

    def store(self, worker: str, prefix: Sequence[int]) -> None:
        """A worker has the KV of a prompt. Of one prompt the last block is forgotten first."""
        blocks, bit = self._blocks[worker], self._bits[worker]
        for block in reversed(prefix[: self._most[worker]]):
            if block not in blocks:
                self._holders[block] = self._holders.get(block, 0) | bit
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._most[worker]:
            old, _ = blocks.popitem(last=False)
            left = self._holders[old] & ~bit
            if left:
                self._holders[old] = left
            else:
                del self._holders[old]
