"""Rates and quantiles between two readings of the router's /metrics.

Quantiles are interpolated within a histogram bucket, as Prometheus' histogram_quantile does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters by name, and histogram buckets (upper bound to count) by name, summed over labels.
    `at` is the time in seconds."""

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def read(text: str, at: float) -> Reading:
    """Parse the Prometheus text format. Raises ValueError."""
    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bound = sample.labels.get("le")
            if bound is None:
                values[sample.name] += sample.value
            else:
                buckets[sample.name.removesuffix("_bucket")][float(bound)] += sample.value
    return Reading(at, dict(values), {name: dict(found) for name, found in buckets.items()})


@dataclass(frozen=True, slots=True)
class Interval:
    """From `before` to `after`. A counter that fell belongs to a restarted router and counts from
    zero."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def rate(self, name: str) -> float:
        """Return the increase of a counter per second."""
        after, before = (x.values.get(name, 0.0) for x in (self.after, self.before))
        gained = after if after < before else after - before
        return gained / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float | None:
        """Return the value below which `share` of the observations lie, or None without any. Values
        above the last bound count as that bound."""
        bounds, counts = self._cumulative(name)
        if not counts[-1]:
            return None
        at = int(np.searchsorted(counts, share * counts[-1]))
        if math.isinf(bounds[at]):
            return bounds[at - 1]
        return float(
            np.interp(share * counts[-1], counts[at - 1 : at + 1], bounds[at - 1 : at + 1])
        )

    def attainment(self, name: str, limit: float) -> float | None:
        """Return the share of observations that are at most `limit`, or None without any."""
        bounds, counts = self._cumulative(name)
        if not counts[-1]:
            return None
        finite = [i for i, bound in enumerate(bounds) if not math.isinf(bound)]
        below = np.interp(limit, [bounds[i] for i in finite], [counts[i] for i in finite])
        return float(below / counts[-1])

    def _cumulative(self, name: str) -> tuple[list[float], list[float]]:
        """Return upper bounds and the number of observations up to each, from 0 on."""
        after, before = self.after.buckets.get(name, {}), self.before.buckets.get(name, {})
        if after.get(math.inf, 0.0) < before.get(math.inf, 0.0):
            before = {}
        steps = sorted((bound, count - before.get(bound, 0.0)) for bound, count in after.items())
        return [0.0, *(b for b, _ in steps)], [0.0, *(c for _, c in steps)]
