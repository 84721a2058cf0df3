"""Means and percentiles, as numpy's "linear" method defines them, infinities included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample's size, mean, percentiles and extremes, in the sample's unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile of a sorted, non-empty sample, linear between its neighbours.

    Between a finite value and an infinite one it is infinite.
    """
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    fraction = position - below
    low = ordered[below]
    if fraction == 0:
        return low
    high = ordered[below + 1]
    return high if math.isinf(high) else low + (high - low) * fraction


def distribution(sample: Sequence[float]) -> Distribution | None:
    """Describe a sample; None if it is empty."""
    if not sample:
        return None
    ordered = sorted(sample)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        min=ordered[0],
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=ordered[-1],
    )
