"""Prompts as token ids that share prefixes exactly as far as their trace says.

A block's tokens are a function of the trace's digest, the seed and the block's id, computed by
SHAKE-256 so that every process and machine makes the same ones. The first tokens of a block are
then overwritten by its number among its siblings (the blocks seen after the same prefix), so two
prompts that part at a block part at its first token; chance alone would let some agree for longer
than their trace has it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from benchmarks.trace import TraceMeta, TraceRequest

_MARGIN = 1000


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids from ``low`` up to, but without, ``high``."""

    low: int
    high: int

    @property
    def span(self) -> int:
        """How many ids there are."""
        return self.high - self.low


def ordinary_tokens(vocab_size: int) -> TokenRange:
    """The ids left after both ends of a vocabulary, where tokenizers keep their special tokens.

    An eighth of the vocabulary is left out at each end, and never more than 1,000 ids. Raises
    :class:`BenchError` for a vocabulary too small to make prompts of.
    """
    if vocab_size < 16:
        raise BenchError(f"vocab_size is {vocab_size}; prompts need at least 16 token ids")
    margin = min(_MARGIN, vocab_size // 8)
    return TokenRange(margin, vocab_size - margin)


class PromptMaker:
    """Makes the prompt of each row of a trace.

    State: for each prefix of block ids seen so far, the numbers given to the blocks that followed
    it. Only :meth:`tokens` changes it, so rows asked for in the same order get the same prompts,
    whatever rows come after them.
    """

    def __init__(
        self,
        meta: TraceMeta,
        *,
        digest: str,
        seed: int,
        token_range: TokenRange,
        block_size: int | None,
    ) -> None:
        self._meta = meta
        self._root = f"{digest}/{seed}"
        self._range = token_range
        self._block_size = block_size
        self._children: dict[int, dict[str, tuple[int, int]]] = {}
        self._nodes = 0
        offset = hashlib.sha256(self._root.encode()).digest()[:8]
        self._offset = int.from_bytes(offset, "little") % token_range.span

    def tokens(self, name: str, row: TraceRequest) -> list[int]:
        """The ``row.input_tokens`` token ids of a row.

        ``name`` tells apart the rows without block ids, which share nothing. Raises
        :class:`BenchError` where the vocabulary cannot tell all siblings apart.
        """
        if row.hash_ids is None or self._block_size is None:
            return self._block(0, f"row/{name}", row.input_tokens)[1]
        scope = self._meta.scope_of(row)
        prefix = "block" if scope is None else f"session/{scope}"
        node = 0
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            left = min(self._block_size, row.input_tokens - len(prompt))
            node, block = self._block(node, f"{prefix}/{hash_id}", left)
            prompt += block
        return prompt

    def _block(self, parent: int, key: str, count: int) -> tuple[int, list[int]]:
        """Make ``count`` tokens of the block ``key`` after ``parent``; return its node too."""
        siblings = self._children.setdefault(parent, {})
        if key not in siblings:
            self._nodes += 1
            siblings[key] = (self._nodes, len(siblings))
        node, number = siblings[key]
        span = self._range.span
        if number >= span * span:
            raise BenchError(
                f"{span} token ids cannot tell {number + 1} prompts apart; use --limit, or a model "
                "with a larger vocabulary"
            )
        block = self._expand(key, count)
        # Two digits, the quicker one first: one token tells siblings apart while there are enough.
        block[0] = self._range.low + (number + self._offset) % span
        if count > 1:
            block[1] = self._range.low + (number // span + self._offset) % span
        return node, block

    def _expand(self, key: str, count: int) -> list[int]:
        raw = hashlib.shake_256(f"{self._root}/{key}".encode()).digest(4 * count)
        words = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
        scaled = (words * np.uint64(self._range.span)) >> np.uint64(32)
        tokens: list[int] = (scaled + np.uint64(self._range.low)).tolist()
        return tokens
