"""How long a step of an engine may take before it hangs: by the longest that steps like it took.
Pure; times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

# A step may take so many times as long as any alike; between two layers, where they are seen, as
# long as any alike took whole.
FACTOR = 4.0
# While nothing alike was measured.
UNKNOWN_S = 60.0
# A step that took this many times as long as its like is believed to have taken so much alone: a
# pause of the machine is no property of the engine, and a lasting change gets through by growing.
_OUTLIER_RATIO = 4.0
_TRUSTED_STEPS = 4
# What each later step leaves of the longest, so that a bad moment is forgotten.
_KEPT = 0.97
# Steps of fewer tokens tell of those of up to so many times as many.
_REACH = 8


@dataclass(slots=True)
class _Longest:
    seconds: float
    steps: int = 1


class StepBounds:
    """State: the longest step lately, for each power of two of tokens that a step computes."""

    def __init__(self) -> None:
        self._longest: dict[int, _Longest] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = tokens.bit_length()
        known = self._longest.get(size)
        if known is None:
            self._longest[size] = _Longest(seconds)
            return
        if known.steps >= _TRUSTED_STEPS:
            seconds = min(seconds, _OUTLIER_RATIO * known.seconds)
        known.seconds = max(seconds, known.seconds * _KEPT)
        known.steps += 1

    def longest_s(self, tokens: int) -> float | None:
        """How long a step of so many tokens takes at the longest: as its like did, or in proportion
        as somewhat smaller ones did. None where neither is known."""
        size = tokens.bit_length()
        for smaller in range(size, max(-1, size - _REACH.bit_length()), -1):
            known = self._longest.get(smaller)
            if known is not None:
                return known.seconds * float(2 ** (size - smaller))
        return None

    def allowance_s(self, tokens: int, *, sees_layers: bool) -> float:
        """How long a step of so many tokens may show nothing."""
        longest_s = self.longest_s(tokens)
        if longest_s is None:
            return UNKNOWN_S
        return longest_s if sees_layers else FACTOR * longest_s
