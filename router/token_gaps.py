"""Histogram of the time between tokens, counted once a frame of a worker.

A worker's step brings a token of every stream that decodes, so the time since its step before is
the gap of each of them. prometheus_client's histogram takes one observation at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)


class Gaps:
    """Gaps of one model's tokens. `counts` has one entry a bound, and one for what is above."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.sum += seconds * times


class TokenGaps(Collector):
    """The metric, by model."""

    def __init__(self) -> None:
        self._models: dict[str, Gaps] = {}

    def of(self, model: str) -> Gaps:
        return self._models.setdefault(model, Gaps())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "pdserve_inter_token_latency_seconds",
            "Time since the worker's step before that brought tokens, for each token.",
            labels=("model",),
        )
        bounds = [*map(floatToGoString, (*BOUNDS_S, float("inf")))]
        for model, gaps in sorted(self._models.items()):
            counts = map(float, accumulate(gaps.counts))
            family.add_metric((model,), list(zip(bounds, counts, strict=True)), gaps.sum)
        yield family


class Pace:
    """Gaps between the frames of one worker."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._last_s: float | None = None
        self._tokens = 0

    def took(self, now: float, tokens: int) -> None:
        """Count a frame with tokens. A stream that began with it has no gap yet."""
        if self._last_s is not None:
            self._gaps.observe(now - self._last_s, min(tokens, self._tokens))
        self._last_s, self._tokens = now, tokens

    def rest(self) -> None:
        """No stream is open, so the next frame follows none."""
        self._last_s = None
