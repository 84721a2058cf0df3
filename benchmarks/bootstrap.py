"""Confidence intervals over rounds, by resampling the rounds.

Requests of one round wait for one another, so it is rounds that are drawn, not requests (the block
bootstrap; Efron and Tibshirani, "An Introduction to the Bootstrap", chapters 8 and 13).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.stats import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVEL: Final = 0.95
RESAMPLES: Final = 2000
MIN_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over all rounds with its 95 % interval, which is None for fewer than three."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(rounds: Sequence[float], key: str) -> Estimate | None:
    """The median of one value a round; None if there is none. The same ``key`` draws alike."""
    if not rounds:
        return None
    middle = median(rounds)
    if len(rounds) < MIN_ROUNDS:
        return Estimate(middle)
    draw = random.Random(key)
    medians = sorted(median(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2 * 100
    return Estimate(middle, percentile(medians, tail), percentile(medians, 100 - tail))


def ratio(rounds: Sequence[tuple[float, float]], key: str) -> Estimate | None:
    """The median of one quotient a round, numerator and denominator measured side by side.

    None where some round has none: a denominator of 0, or an infinity.
    """
    if any(bottom == 0 or math.isinf(top) or math.isinf(bottom) for top, bottom in rounds):
        return None
    return estimate([top / bottom for top, bottom in rounds], key)


def pooled_ratio(rounds: Sequence[tuple[float, float]], key: str) -> Estimate | None:
    """The quotient of two sums over rounds, whose terms were measured side by side. Unlike a median
    it shows a single bad round. None where some round's denominator is 0."""
    if not rounds or any(bottom == 0 for _, bottom in rounds):
        return None
    whole = _quotient(rounds)
    if len(rounds) < MIN_ROUNDS:
        return Estimate(whole)
    draw = random.Random(key)
    found = sorted(_quotient(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2 * 100
    return Estimate(whole, percentile(found, tail), percentile(found, 100 - tail))


def _quotient(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(top for top, _ in rounds) / sum(bottom for _, bottom in rounds)
