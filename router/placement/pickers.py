"""Pickers: one of those that are left. `turn` counts placements, so a choice can be made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.placement.values import Candidate

# Scores are sums of ratios: equal states may differ in the last bit.
_EQUAL = 1e-9
_MASK = (1 << 64) - 1

Sampler = Callable[[list["Candidate"], int], list["Candidate"]]
"""Which of the candidates are scored at all, at a turn."""


def best(totals: Mapping[Candidate, float], among: Sequence[Candidate], turn: int) -> Candidate:
    """The one with the highest total; equal ones take turns."""
    highest = max(map(totals.__getitem__, among))
    equals = [c for c in among if highest - totals[c] < _EQUAL]
    return equals[turn % len(equals)]


def everyone(candidates: list[Candidate], _turn: int) -> list[Candidate]:
    """No sampling."""
    return candidates


def two(candidates: list[Candidate], turn: int) -> list[Candidate]:
    """Two different ones that look random and follow from `turn` alone."""
    count = len(candidates)
    if count <= 2:
        return candidates
    bits = _mix(turn)
    first = (bits & 0xFFFFFFFF) % count
    second = (first + 1 + (bits >> 32) % (count - 1)) % count
    return [candidates[first], candidates[second]]


def _mix(turn: int) -> int:
    """64 bits of a turn: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (turn * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
