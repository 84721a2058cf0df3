"""By how much those who decode on a worker were held up lately, and how long answers are."""

from __future__ import annotations

import math

# Answers that the mean length remembers, and the gaps that one is taken to have before any ended.
_REMEMBERED = 64.0
_FIRST_GUESS = 16.0


class Stalls:
    """State: for each worker the seconds of the prompts that it was given to compute beside its
    streams, fading as those streams end; for each model the mean number of gaps in an answer."""

    def __init__(self) -> None:
        self._held_s: dict[str, tuple[float, float]] = {}
        self._gaps: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._held_s)

    def answered(self, model: str, gaps: int) -> None:
        """An answer had so many gaps between tokens."""
        count, mean = self._gaps.get(model, (0.0, 0.0))
        count = min(_REMEMBERED, count + 1.0)
        self._gaps[model] = (count, mean + (gaps - mean) / count)

    def gaps(self, model: str) -> float:
        """In an answer that is running now; at least 1."""
        return max(1.0, self._gaps.get(model, (0.0, _FIRST_GUESS))[1])

    def add(self, worker: str, seconds: float, life_s: float, now: float) -> None:
        """A prompt that takes so long was placed beside streams that live for `life_s`."""
        self._held_s[worker] = (self.held_s(worker, life_s, now) + seconds, now)

    def held_s(self, worker: str, life_s: float, now: float) -> float:
        """By how much a stream that runs there now was or will be held up by what was added."""
        seconds, since = self._held_s.get(worker, (0.0, now))
        return seconds * math.exp(-max(0.0, now - since) / life_s) if life_s > 0 else 0.0

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._held_s.pop(worker, None)
