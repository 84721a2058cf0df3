"""The prefix cache of a fake engine."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.model import prefix_hash
from workers.cache.mirror import CacheMirror
from workers.cache.retention import RetainedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.engine import Work


class PrefixCache(CacheMirror):
    """A prefix cache of `max_blocks`, whose keys are the chain hashes. Like vLLM's cache, it evicts
    the least recently used blocks, the last blocks of a prompt before its first, and retained
    blocks after all others. State: other and retained blocks, the least recently used first.
    """

    def __init__(
        self, name: str, block_size: int, max_blocks: int, retained: RetainedBlocks | None = None
    ) -> None:
        super().__init__(name, block_size)
        self._max_blocks = max_blocks
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self.retained = retained or RetainedBlocks(0, 0.0)

    def hit(self, work: Work) -> int:
        """Return the number of cached tokens of the prompt."""
        count = prefix_hash.usable_blocks(len(work.prompt_token_ids), self._block_size)
        chain = self._chain(work, work.prompt_token_ids, count)
        return sum(x in self for x in chain) * self._block_size

    def keep(self, work: Work, generated: Iterable[int] = ()) -> None:
        """Cache the blocks of a computed or received prompt, and of the tokens after it."""
        token_ids = (*work.prompt_token_ids, *generated)
        chain = self._chain(work, token_ids, self._max_blocks)
        cached, media = token_ids[: len(chain) * self._block_size], self._media_of(work)
        self.store(chain, None, cached, work.adapter, work.cache_salt, media)
        for chain_hash in chain:
            self._place(self.retained.used(chain_hash))
        self._place(reversed(chain))
        while len(self._recent) + len(self._retained) > self._max_blocks:
            evicted, _ = (self._recent or self._retained).popitem(last=False)
            self.retained.evicted(evicted)
            self.remove(evicted)

    def retain(self, work: Work, generated: Iterable[int], now: float) -> None:
        """Retain the cached blocks of a session's turn that has ended."""
        token_ids = (*work.prompt_token_ids, *generated)
        blocks = [x for x in reversed(self._chain(work, token_ids, self._max_blocks)) if x in self]
        self._place(self.retained.retain(blocks, now, work.next_turn_s or 0.0))
        self._place(blocks)

    def expire(self, now: float) -> None:
        """End retention whose time is over."""
        self._place(self.retained.expire(now))

    def clear(self) -> None:
        super().clear()
        self._recent.clear()
        self._retained.clear()

    def _place(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._recent.pop(block, None)
            self._retained.pop(block, None)
            (self._retained if block in self.retained else self._recent)[block] = None

    def _chain(self, work: Work, token_ids: tuple[int, ...], count: int) -> list[int]:
        root, media = self.root(work.adapter, work.cache_salt), self._media_of(work)
        return prefix_hash.chain(token_ids, self._block_size, root, blocks=count, media=media)

    def _media_of(self, work: Work) -> dict[int, list[prefix_hash.MediaKey]]:
        items = [(x.hash, x.offset, x.length) for x in work.media]
        return prefix_hash.media_keys(items, self._block_size)
