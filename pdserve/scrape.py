"""What happened between two readings of the router's /metrics: rates, quantiles, attainment.

Pure. Quantiles come from histogram buckets, by linear interpolation within one (as Prometheus'
histogram_quantile does), so they are as fine as the buckets are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters and gauges by name, histogram buckets (upper bound → count) by name, each summed
    over its labels. `at` is when it was read, in seconds."""

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def read(text: str, at: float) -> Reading:
    """Raises ValueError for a text that is not Prometheus'."""
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
    """From `before` to `after`. A counter that fell belongs to a router that was started again: it
    counts from zero."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def gained(self, name: str) -> float:
        """What a counter counted."""
        after = self.after.values.get(name, 0.0)
        before = self.before.values.get(name, 0.0)
        return after if after < before else after - before

    def rate(self, name: str) -> float:
        """What a counter counted, per second."""
        return self.gained(name) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float | None:
        """The value below which `share` of the observations lie; None without any. One beyond the
        last bound reads as that bound."""
        steps = self._steps(name)
        total = steps[-1][1] if steps else 0.0
        if not total:
            return None
        lower = below = 0.0
        for bound, count in steps:
            if count >= share * total:
                if math.isinf(bound):
                    return lower
                part = (share * total - below) / (count - below)
                # Rounding may carry the sum past the bound.
                return min(bound, lower + (bound - lower) * part)
            lower, below = bound, count
        return lower

    def attainment(self, name: str, limit: float) -> float | None:
        """The share of the observations that are at most `limit`; None without any."""
        steps = self._steps(name)
        total = steps[-1][1] if steps else 0.0
        if not total:
            return None
        lower = below = 0.0
        for bound, count in steps:
            if limit < bound:
                part = 0.0 if math.isinf(bound) else (limit - lower) / (bound - lower)
                return (below + (count - below) * part) / total
            lower, below = bound, count
        return 1.0

    def _steps(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, observations up to it), with falling counts as in `gained`."""
        after = self.after.buckets.get(name, {})
        before = self.before.buckets.get(name, {})
        if after.get(_INF, 0.0) < before.get(_INF, 0.0):
            before = {}
        return sorted((bound, count - before.get(bound, 0.0)) for bound, count in after.items())
