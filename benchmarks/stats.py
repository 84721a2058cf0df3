"""Percentiles and bootstrap intervals."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES: Final = 2000
MIN_ROUNDS: Final = 3  # an interval over fewer rounds says nothing


@dataclass(frozen=True, slots=True)
class Distribution:
    """Size, mean, percentiles and extremes of a sample, in the sample's unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over rounds with its 95 % interval; no interval below `MIN_ROUNDS` rounds."""

    value: float
    low: float | None = None
    high: float | None = None


def percentile(sample: Sequence[float], percent: float) -> float:
    """Interpolate linearly. Where the sample holds infinities, take the next higher value."""
    ordered = sorted(sample)
    if math.isinf(ordered[-1]):
        return ordered[math.ceil((len(ordered) - 1) * percent / 100)]
    return float(np.percentile(ordered, percent))


def distribution(sample: Sequence[float]) -> Distribution | None:
    """Return None for an empty sample."""
    if not sample:
        return None
    p50, p90, p95, p99 = (percentile(sample, percent) for percent in (50, 90, 95, 99))
    mean = math.fsum(sample) / len(sample)
    return Distribution(len(sample), mean, min(sample), p50, p90, p95, p99, max(sample))


def estimate(rounds: Sequence[float], key: str) -> Estimate | None:
    """Return the median of one value a round, with an interval from resampled rounds.

    Requests of one round influence each other, so whole rounds are drawn (block bootstrap; Efron
    and Tibshirani, An Introduction to the Bootstrap, ch. 8). The same `key` draws the same.
    """
    if not rounds:
        return None
    middle = percentile(rounds, 50)
    if len(rounds) < MIN_ROUNDS:
        return Estimate(middle)
    draw = np.random.default_rng(zlib.crc32(key.encode()))
    drawn = draw.choice(np.asarray(rounds), (RESAMPLES, len(rounds)))
    medians = np.median(drawn, axis=1).tolist()
    return Estimate(middle, percentile(medians, 2.5), percentile(medians, 97.5))


def ratio(rounds: Sequence[tuple[float, float]], key: str) -> Estimate | None:
    """Return the median of one quotient a round; None if a quotient is not a finite number."""
    if any(bottom == 0 or math.isinf(top) or math.isinf(bottom) for top, bottom in rounds):
        return None
    return estimate([top / bottom for top, bottom in rounds], key)
