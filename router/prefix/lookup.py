"""What is cached of a prompt, and where: the placement's question to the index."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from pdserve import prefix_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.placement.values import Demand
    from router.prefix.index import PrefixIndex

    # Token ids, and their hashes by model and block size.
    _Chains = tuple[tuple[int, ...], dict[tuple[str, int], array[int]]]

# Prompts whose hashes are kept, and their tokens: a request that waits for room asks again and
# again. Nobody says when one has ended, and a token of a prompt takes 34 bytes.
MAX_PROMPTS = 2048
MAX_TOKENS = 1 << 18


class IndexLookup:
    """A `PrefixLookup` over the index. State: which block sizes the workers of each model have, and
    the chain hashes of the latest prompts, by the identity of their token ids."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._sizes: dict[str, Counter[int]] = {}
        self._chains: OrderedDict[int, _Chains] = OrderedDict()
        self._tokens = 0

    def joined(self, model: str, block_size: int) -> None:
        """A worker's blocks can be found from now on."""
        self._sizes.setdefault(model, Counter())[block_size] += 1

    def left(self, model: str, block_size: int) -> None:
        """That worker's blocks are gone."""
        sizes = self._sizes[model]
        sizes[block_size] -= 1
        if not sizes[block_size]:
            del sizes[block_size]
        if not sizes:
            del self._sizes[model]

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """Tokens of the prompt that each worker would take from its cache, by worker id; workers
        without any are left out."""
        cached: dict[str, int] = {}
        for block_size in self._sizes.get(demand.model, ()):
            found = self._index.lengths(self._chain(demand, block_size), block_size)
            cached = cached | found if cached else found
        return cached

    def _chain(self, demand: Demand, block_size: int) -> array[int]:
        token_ids, key = demand.token_ids, (demand.model, block_size)
        chains = self._of(token_ids)
        if key not in chains:
            hashes = prefix_hash.chain(
                token_ids,
                block_size,
                prefix_hash.root(*key),
                blocks=prefix_hash.usable_blocks(len(token_ids), block_size),
            )
            chains[key] = array("Q", hashes)
        return chains[key]

    def _of(self, token_ids: tuple[int, ...]) -> dict[tuple[str, int], array[int]]:
        known = self._chains.get(id(token_ids))
        if known is not None:
            self._chains.move_to_end(id(token_ids))
            return known[1]
        chains: dict[tuple[str, int], array[int]] = {}
        self._chains[id(token_ids)] = token_ids, chains
        self._tokens += len(token_ids)
        while len(self._chains) > MAX_PROMPTS or (
            self._tokens > MAX_TOKENS and len(self._chains) > 1
        ):
            _, (gone, _) = self._chains.popitem(last=False)
            self._tokens -= len(gone)
        return chains
