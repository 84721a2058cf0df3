"""Leak detection: whether a measure grows without a bound.

A measure leaks if its slope after the warm-up exceeds a limit with 95 % confidence, and the slope
of the second half exceeds it too, so the growth does not fade. The limit per hour is
`LIMIT_PER_HOUR` times the median, or `NOISE` over the measured time if that is more.

The slope is the Theil-Sen estimator over the medians of windows. It is robust against outliers and
against a single step, such as a buffer that is allocated once. The interval is Sen's (Estimates of
the Regression Coefficient Based on Kendall's Tau, 1968).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT_PER_HOUR: Final = 0.01  # share of the median
WINDOWS: Final = 24
MIN_WINDOWS: Final = 8  # fewer are not conclusive
MIB: Final = 1 << 20
NOISE: Final[Mapping[str, float]] = {
    "memory": 2 * MIB,
    "descriptors": 3,
    "threads": 3,
    "tasks": 5,
    "series": 5,
    "processes": 2,
    "disk": 2 * MIB,
}
_CONFIDENCE: Final = 0.95
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one measure of one process. Slopes and limit are per hour, in the measure's
    unit."""

    process: str
    measure: str
    samples: int
    median: float
    limit: float
    slope: float
    slope_low: float
    late_slope: float
    leaks: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def growth(
    process: str, measure: str, times_s: Sequence[float], values: Sequence[float]
) -> Growth | None:
    """Return the growth over samples in order of time. Return None if there are too few."""
    count = min(WINDOWS, len(values))
    if count < MIN_WINDOWS:
        return None
    hours = np.array([np.median(x) for x in np.array_split(np.asarray(times_s), count)]) / _HOUR_S
    levels = np.array([np.median(x) for x in np.array_split(np.asarray(values, float), count)])
    slope, low = _theil_sen(hours, levels)
    late_slope, _ = _theil_sen(hours[count // 2 :], levels[count // 2 :])
    median = float(np.median(levels))
    measured = (times_s[-1] - times_s[0]) / _HOUR_S
    limit = max(LIMIT_PER_HOUR * median, NOISE[measure] / measured)
    leaks = low > limit and late_slope > limit
    return Growth(process, measure, len(values), median, limit, slope, low, late_slope, leaks)


def _theil_sen(times: Any, values: Any) -> tuple[float, float]:
    """Return the median slope of all pairs of points, and the lower end of its interval."""
    count = len(times)
    first, second = np.triu_indices(count, 1)
    slopes = np.sort((values[second] - values[first]) / (times[second] - times[first]))
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    spread = z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lowest = max(0, math.floor((len(slopes) - spread) / 2))
    return float(np.median(slopes)), float(slopes[lowest])
