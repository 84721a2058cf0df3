"""The fake engine's prefix cache: which blocks of prompts it has computed, the least used go first.

Only names are kept, there is no KV. Like vLLM's it frees a prompt's last blocks before its first.
"""

from __future__ import annotations

from collections import OrderedDict

from pdserve import prefix_hash
from workers.cache_mirror import CacheChange


class FakeCache:
    """State: chain hashes of the blocks that are cached, the least recently used first, and what
    has changed since `take`."""

    def __init__(self, model: str, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._root = prefix_hash.root(model, block_size)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def hit(self, prompt_token_ids: tuple[int, ...]) -> int:
        """Tokens of the prompt that need not be computed."""
        count = prefix_hash.usable_blocks(len(prompt_token_ids), self._block_size)
        found = 0
        for chain_hash in self._chain(prompt_token_ids, count):
            if chain_hash not in self._blocks:
                break
            found += 1
        return found * self._block_size

    def store(self, prompt_token_ids: tuple[int, ...]) -> None:
        """The prompt has been computed, or received."""
        chain = self._chain(prompt_token_ids, self._max_blocks)
        for chain_hash in chain:
            if chain_hash not in self._blocks:
                self._blocks[chain_hash] = None
                if chain_hash in self._removed:
                    del self._removed[chain_hash]
                else:
                    self._stored[chain_hash] = None
        for chain_hash in reversed(chain):
            self._blocks.move_to_end(chain_hash)
        while len(self._blocks) > self._max_blocks:
            self._evict(self._blocks.popitem(last=False)[0])

    def _evict(self, chain_hash: int) -> None:
        if chain_hash in self._stored:
            del self._stored[chain_hash]
        else:
            self._removed[chain_hash] = None

    def _chain(self, token_ids: tuple[int, ...], count: int) -> list[int]:
        return prefix_hash.chain(token_ids, self._block_size, self._root, blocks=count)

    def take(self) -> CacheChange | None:
        """What has changed since the last call, or None."""
        if not self._stored and not self._removed:
            return None
        change = CacheChange(tuple(self._removed), tuple(self._stored))
        self._stored, self._removed = {}, {}
        return change
