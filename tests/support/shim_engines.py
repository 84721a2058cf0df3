"""The model of tests/support/engine_patches/skipped_kernels.py, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = (1 << 64) - 1


def extended(words: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return the words of the tokens behind those that have theirs."""
    made, last = [], words[-1] if words else 0
    for token in tokens[len(words) :]:
        last = (last * 6364136223846793005 + 2 * token + 1) & _WORD
        made.append(last)
    return made


def next_token(word: int) -> int:
    """Return the token after a sequence whose last word this is: never 0, 1 or 2."""
    return 3 + (word >> 33) % 397


def answer(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the tokens that follow a prompt."""
    words, tokens = extended((), prompt), list(prompt)
    for _ in range(count):
        tokens.append(next_token(words[-1]))
        words += extended(words, tokens)
    return tuple(tokens[len(prompt) :])
