"""The engine's prefix cache in the form that routers use: chain hashes of blocks, after parents.

Engines have their own block keys; the mirror maps each key to the chain hash of the block's tokens
and images.
An engine's lookup stops at the first missing block, so removing a block withdraws all blocks after
it. This is rare, because vLLM evicts the last blocks of a prompt first. A withdrawn block that is
still cached when its parent returns is not reported again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from pdserve.model import prefix_hash
from workers.engine import CacheChange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = Hashable


class CacheMirror:
    """The mirror. State: chain hash and children of each block by the engine's key, and the changes
    since `take`; the same for blocks in host memory.

    A block whose parent is unknown here is ignored. Such a parent may have inputs that chain
    hashes do not cover, such as embeddings. Engines report only keys for blocks in host memory, so
    such a block appears only if it was in the main cache before.
    """

    def __init__(self, model: str, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._hashes: dict[Key, int] = {}
        self._parents: dict[Key, Key] = {}
        self._children: dict[Key, dict[Key, None]] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._tier: dict[Key, int | None] = {}
        self._tier_stored: dict[int, None] = {}
        self._tier_removed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, key: Key) -> bool:
        return key in self._hashes

    def root(self, adapter: str = "", cache_salt: str = "") -> int:
        """Return the hash seed of a prompt's first block, for the model or one of its adapters."""
        return prefix_hash.root(self._model, self._block_size, adapter, cache_salt)

    def store(
        self,
        keys: Sequence[Key],
        parent: Key | None,
        token_ids: Sequence[int],
        adapter: str = "",
        cache_salt: str = "",
        media: Mapping[int, Sequence[prefix_hash.MediaKey]] = prefix_hash.NO_MEDIA,
    ) -> None:
        """Add consecutive blocks after `parent`. `token_ids` are the tokens of all of them, `media`
        the images in each by its index in `keys`. Known blocks are skipped."""
        skipped = 0
        while skipped < len(keys) and keys[skipped] in self._hashes:
            parent = keys[skipped]
            skipped += 1
        if skipped == len(keys):
            return
        if parent is not None and parent not in self._hashes:
            return
        seed = self.root(adapter, cache_salt) if parent is None else self._hashes[parent]
        hashes = prefix_hash.chain(
            token_ids[skipped * self._block_size :],
            self._block_size,
            seed,
            media={index - skipped: found for index, found in media.items()},
        )
        for key, chain_hash in zip(keys[skipped:], hashes, strict=True):
            if key in self._hashes:
                self.remove(key)  # cached after another parent before
            self._hashes[key] = chain_hash
            if key in self._tier:
                self.store_in_tier(key)
            if parent is not None:
                self._parents[key] = parent
                self._children.setdefault(parent, {})[key] = None
            if self._removed.pop(chain_hash, chain_hash) is not None:
                self._stored[chain_hash] = None
            parent = key

    def remove(self, key: Key) -> None:
        """Withdraw a known block and all blocks after it."""
        gone = [key] if key in self._hashes else []
        parent = self._parents.get(key)
        if parent is not None:
            del self._children[parent][key]
            if not self._children[parent]:
                del self._children[parent]
        for each in gone:
            self._parents.pop(each, None)
            gone += self._children.pop(each, ())
            chain_hash = self._hashes.pop(each, None)
            if chain_hash is not None and self._stored.pop(chain_hash, chain_hash) is not None:
                self._removed[chain_hash] = None

    def clear(self) -> None:
        """Withdraw all blocks."""
        for key in list(self._hashes):
            self.remove(key)

    def store_in_tier(self, key: Key) -> None:
        """Add a block in host memory."""
        chain_hash = self._hashes.get(key)
        if self._tier.get(key) is None:
            self._tier[key] = chain_hash
            if chain_hash is not None and self._tier_removed.pop(chain_hash, key) is not None:
                self._tier_stored[chain_hash] = None

    def remove_from_tier(self, key: Key) -> None:
        """Withdraw a block in host memory, if it is known."""
        chain_hash = self._tier.pop(key, None)
        if chain_hash is not None and self._tier_stored.pop(chain_hash, key) is not None:
            self._tier_removed[chain_hash] = None

    def take(self) -> CacheChange:
        """Return all changes since the last call, each block at most once."""
        change = CacheChange(
            *map(tuple, (self._removed, self._stored, self._tier_removed, self._tier_stored))
        )
        self._stored, self._removed, self._tier_stored, self._tier_removed = {}, {}, {}, {}
        return change
