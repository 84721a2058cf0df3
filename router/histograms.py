"""Histograms for Prometheus that cost little to count in: each answer is counted in a dozen, for
which the library's own, with their locks, take several times as long."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator


class Histogram:
    """State: how many values were at most each of `bounds`, which ascend, and no lower one's; how
    many were above them all; and their sum. For one thread."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One value, or as many alike."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class Histograms(Collector):
    """One metric: a histogram for each set of values of its labels, made when first asked for."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._of: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        """The one of these labels."""
        found = self._of.get(values)
        if found is None:
            found = self._of[values] = Histogram(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, (*self._bounds, float("inf")))]
        for values, histogram in sorted(self._of.items()):
            counts = map(float, accumulate(histogram.counts))
            family.add_metric(values, list(zip(bounds, counts, strict=True)), histogram.sum)
        yield family
