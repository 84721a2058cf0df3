"""Counters for Prometheus that cost little to count in, as router/histograms.py has histograms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator


class Count:
    """State: the sum of what was counted. For one thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by


class Counts(Collector):
    """One metric: a count for each set of values of its labels, made when first asked for."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._of: dict[tuple[str, ...], Count] = {}

    def of(self, *values: str) -> Count:
        """The one of these labels."""
        found = self._of.get(values)
        if found is None:
            found = self._of[values] = Count()
        return found

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in sorted(self._of.items()):
            family.add_metric(values, count.value)
        yield family
