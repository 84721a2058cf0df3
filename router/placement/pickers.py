"""Pickers: one of those that are left. `turn` counts placements, so a choice can be made again."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.placement.values import Candidate

# Scores are sums of ratios: equal states may differ in the last bit.
_EQUAL = 1e-9
_MASK = (1 << 64) - 1

# Of a larger pool so many are scored for each phase: the best of 64 drawn at random is among the
# best twentieth of all but once in 27 times (0.95^64), and scoring does not grow with the pool.
MOST_SCORED = 64
MOST_CACHED = 16


class Phase(IntEnum):
    """For what a worker is drawn: each phase draws by itself."""

    DECODE = 0
    PREFILL = 1


Sampler = Callable[[list["Candidate"], int, Phase, Mapping[str, int]], list["Candidate"]]
"""Which of the candidates are scored at all, at a turn, with the tokens that each has cached."""


def best(totals: Mapping[Candidate, float], among: Sequence[Candidate], turn: int) -> Candidate:
    """The one with the highest total; equal ones take turns."""
    highest = max(map(totals.__getitem__, among))
    equals = [c for c in among if highest - totals[c] < _EQUAL]
    return equals[turn % len(equals)]


def next_one(
    candidates: list[Candidate], turn: int, _phase: Phase, _cached: Mapping[str, int]
) -> list[Candidate]:
    """The one whose turn it is."""
    return [candidates[turn % len(candidates)]] if candidates else []


def two(
    candidates: list[Candidate], turn: int, phase: Phase, _cached: Mapping[str, int]
) -> list[Candidate]:
    """Two different ones that look random and follow from `turn` alone."""
    count = len(candidates)
    if count <= 2:
        return candidates
    bits = mix(2 * turn + phase)
    first = (bits & 0xFFFFFFFF) % count
    second = (first + 1 + (bits >> 32) % (count - 1)) % count
    return [candidates[first], candidates[second]]


def many(
    candidates: list[Candidate], turn: int, phase: Phase, cached: Mapping[str, int]
) -> list[Candidate]:
    """All of them, or of a large pool as many as are scored: those with most of the prompt cached,
    and others that look random and follow from `turn` alone."""
    if len(candidates) <= MOST_SCORED:
        return candidates
    holders = [c for c in candidates if c.worker_id in cached] if cached else []
    if len(holders) > MOST_CACHED:
        holders = heapq.nlargest(MOST_CACHED, holders, key=lambda c: cached[c.worker_id])
    chance = random.Random(mix(2 * turn + phase))
    return list(dict.fromkeys(holders + chance.sample(candidates, MOST_SCORED - len(holders))))


def mix(turn: int) -> int:
    """64 bits of a turn: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (turn * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
