"""An engine's prefix cache as the router sees it: by chain hashes, and closed.

Engines name blocks in their own way; the mirror gives each the chain hash of its tokens. A lookup
in an engine ends at the first block that is not there, so a block whose parent is gone serves
nobody, although it is cached: it is hidden here until its parent is back. What is shown is
therefore always closed: with a block all blocks before it. Synchronous, no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve import prefix_hash
from workers.engine import CacheChange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Key = bytes


@dataclass(frozen=True, slots=True)
class _Block:
    chain_hash: int
    parent: Key | None


class CacheMirror:
    """State: the blocks that are cached, by the engine's key; which of them are hidden; what has
    changed since `take`. `left_out` counts blocks that were stored behind a block not known here:
    behind one with a salt, an adapter or an image, which are not told by their tokens."""

    def __init__(self, model: str, block_size: int) -> None:
        self.left_out = 0
        self._block_size = block_size
        self._root = prefix_hash.root(model, block_size)
        self._blocks: dict[Key, _Block] = {}
        self._children: dict[Key, int] = {}
        self._hidden: set[Key] = set()
        self._changed: dict[int, bool] = {}
        self._before: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks) - len(self._hidden)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def store(self, keys: Sequence[Key], parent: Key | None, token_ids: Sequence[int]) -> None:
        """Blocks that follow one another behind `parent`, with the tokens of all of them. Those
        that are known already are passed over."""
        skipped = 0
        while skipped < len(keys) and keys[skipped] in self._blocks:
            parent = keys[skipped]
            skipped += 1
        if skipped == len(keys):
            return
        if parent is None:
            seed = self._root
        elif (known := self._blocks.get(parent)) is not None:
            seed = known.chain_hash
        else:
            self.left_out += len(keys) - skipped
            return
        token_ids = token_ids[skipped * self._block_size :]
        hashes = prefix_hash.chain(token_ids, self._block_size, seed)
        for key, chain_hash in zip(keys[skipped:], hashes, strict=True):
            if key not in self._blocks:
                self._insert(key, _Block(chain_hash, parent))
            parent = key

    def _insert(self, key: Key, block: _Block) -> None:
        self._blocks[key] = block
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
            if block.parent in self._hidden:
                self._hidden.add(key)
                return
        self._show(block.chain_hash)
        if self._children.get(key):
            self._reveal_behind(key)

    def remove(self, key: Key) -> None:
        """The engine holds this block no more; unknown ones are ignored."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        if block.parent is not None:
            self._children[block.parent] -= 1
            if not self._children[block.parent]:
                del self._children[block.parent]
        if key in self._hidden:
            self._hidden.discard(key)
            return
        self._withdraw(block.chain_hash)
        if key in self._children:
            self._hide_behind(key)

    def clear(self) -> None:
        """The engine holds no block any more."""
        for key, block in self._blocks.items():
            if key not in self._hidden:
                self._withdraw(block.chain_hash)
        self._blocks.clear()
        self._children.clear()
        self._hidden.clear()

    def take(self) -> CacheChange:
        """All changes since the last call, each block at most once."""
        change = CacheChange(
            tuple(x for x, shown in self._changed.items() if not shown and x in self._before),
            tuple(x for x, shown in self._changed.items() if shown and x not in self._before),
        )
        self._changed, self._before = {}, set()
        return change

    def _show(self, chain_hash: int) -> None:
        # Behind whatever came last: the order of parents before children.
        self._changed.pop(chain_hash, None)
        self._changed[chain_hash] = True

    def _withdraw(self, chain_hash: int) -> None:
        if chain_hash not in self._changed:
            self._before.add(chain_hash)
        self._changed[chain_hash] = False

    def _descendants(self, key: Key) -> Iterable[tuple[Key, _Block]]:
        """Parents first. Looks at every block: needed only where an engine drops a block before
        those behind it, which vLLM's order of eviction avoids."""
        by_parent = defaultdict(list)
        for other, block in self._blocks.items():
            if block.parent is not None:
                by_parent[block.parent].append((other, block))
        found = list(by_parent[key])
        for other, _ in found:
            found += by_parent.get(other, ())
        return found

    def _hide_behind(self, key: Key) -> None:
        for other, block in self._descendants(key):
            if other not in self._hidden:
                self._hidden.add(other)
                self._withdraw(block.chain_hash)

    def _reveal_behind(self, key: Key) -> None:
        for other, block in self._descendants(key):
            self._hidden.discard(other)
            self._show(block.chain_hash)
