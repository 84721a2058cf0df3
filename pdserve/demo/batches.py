"""Training batches: documents packed into rows of tokens, with positions spread over the context.

Most rows are short, which is cheap. So that the model still works far into its context, some rows
are long, and in half of the short ones the positions jump between documents (the idea of PoSE,
arXiv:2309.10400): the model meets every distance without paying for it.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer

from pdserve.demo.corpus import Corpus
from pdserve.demo.documents import Document

_TOKENS_PER_BATCH: Final = 4096
_QUESTION_WEIGHT: Final = 0.05
_ROW_LENGTHS: Final = (256, 512, 2048)
_ROW_SHARES: Final = (0.65, 0.25, 0.10)
_JUMP_SHARE: Final = 0.5
_LONG_ROW: Final = 2048
_LONG_SENTENCES: Final = 60


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length; all three tensors have the shape (rows, length)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    tokens: list[int]
    weights: list[float]


class Batches:
    """Draws batches for ever. Owns two corpora and its random state."""

    def __init__(self, tokenizer: Tokenizer, seed: int, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._rng = Random(seed)
        self._max_positions = max_positions
        self._short = Corpus(seed + 1).documents()
        self._long = Corpus(seed + 2).long_documents(_LONG_SENTENCES)

    def draw(self) -> Batch:
        """The next batch, of about `_TOKENS_PER_BATCH` tokens."""
        length = self._rng.choices(_ROW_LENGTHS, _ROW_SHARES)[0]
        rows = [self._row(length) for _ in range(_TOKENS_PER_BATCH // length)]
        return Batch(
            torch.tensor([row[0] for row in rows]),
            torch.tensor([row[1] for row in rows]),
            torch.tensor([row[2] for row in rows]),
        )

    def _row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        """Documents one after another until the row is full; the last one is cut."""
        documents = self._long if length >= _LONG_ROW else self._short
        jumping = self._rng.random() < _JUMP_SHARE
        room = self._max_positions - length
        tokens: list[int] = []
        positions: list[int] = []
        weights: list[float] = []
        while len(tokens) < length:
            piece = self._encode(next(documents))
            jump = 0
            if jumping and tokens and self._rng.random() < 0.5:
                jump = self._rng.randint(0, room)
                room -= jump
            start = positions[-1] + 1 + jump if positions else 0
            tokens += piece.tokens
            weights += piece.weights
            positions += range(start, start + len(piece.tokens))
        return tokens[:length], positions[:length], weights[:length]

    def _encode(self, document: Document) -> _Encoded:
        tokens: list[int] = []
        weights: list[float] = []
        for span in document.spans():
            ids = self._tokenizer.encode(span.text, add_special_tokens=False).ids
            tokens += ids
            weights += [1.0 if span.learned else _QUESTION_WEIGHT] * len(ids)
        return _Encoded(tokens, weights)
