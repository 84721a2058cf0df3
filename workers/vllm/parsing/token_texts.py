"""The texts of an answer's tokens: which the engine has released, and where each one ends."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class UnreleasedTokens:
    """Tokens whose text the engine has not released yet. State: these tokens with their texts, and
    released text of theirs."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer: Any = detokenizer
        self._waiting: deque[tuple[int, str]] = deque()
        self.released = ""

    def text_of(self, token_id: int) -> str:
        """Return the text that the next token adds."""
        self._detokenizer.update([token_id], False)
        piece: str = self._detokenizer.output_text
        self._detokenizer.output_text = ""
        return piece

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """`text`: released by the engine, of these and of earlier tokens."""
        self._waiting += [(x, self.text_of(x)) for x in token_ids]
        self.released += text

    def take(self) -> Iterator[tuple[list[int], str]]:
        """Yield each token whose text is released, with its text. If the engine's text differs from
        that of the tokens, yield all of them with all released text."""
        while self._waiting and self.released.startswith(self._waiting[0][1]):
            token_id, piece = self._waiting.popleft()
            self.released = self.released[len(piece) :]
            yield [token_id], piece
        if self._waiting and not self._waiting[0][1].startswith(self.released):
            token_ids, text = self.token_ids, self.released
            self._waiting.clear()
            self.released = ""
            yield token_ids, text

    @property
    def token_ids(self) -> list[int]:
        return [x for x, _ in self._waiting]


class TokenPlaces:
    """Where the texts of tokens end in the answer. Names tokens of a part by their positions, each
    token once. `first`: position of the first token after parts that the client has."""

    def __init__(self) -> None:
        self.first = 0
        self._ends: list[int] = []
        self._named_to = 0

    def add(self, count: int, end: int) -> None:
        """Add tokens whose texts end at `end`."""
        self._ends += [end] * count

    def begin_here(self) -> None:
        """Count positions from the next token."""
        self.first = len(self._ends)

    def named(self, begin: int, end: int) -> list[int]:
        """Return the tokens with the text from `begin` to `end`."""
        first = bisect_left(self._ends, begin)
        if first < len(self._ends) and self._ends[first] == begin:
            first += (self._ends[first - 1] if first else 0) < begin  # it ends here
        following = bisect_left(self._ends, end) + 1
        first = max(first, self._named_to)
        self._named_to = max(following, self._named_to)
        return [x - self.first for x in range(first, following)]

    def name_again(self) -> None:
        """Let tokens that were named be named again."""
        self._named_to = 0

    def rest(self) -> list[int]:
        """Return the tokens after those that were named."""
        return [x - self.first for x in range(max(self._named_to, self.first), len(self._ends))]
