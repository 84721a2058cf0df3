"""The gaps between tokens, counted once a frame: a worker's step brings a token of every stream
that decodes, so the time since the step before is the gap of each of them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)


class TokenGaps:
    """State: how many tokens came after a gap of each size, and the gaps' sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, gap_s: float, tokens: int) -> None:
        """So many tokens came so long after those before them."""
        self.counts[bisect_left(BOUNDS_S, gap_s)] += tokens
        self.sum_s += gap_s * tokens


class Pace:
    """One worker's frames. State: when the last one with tokens came, and how many they were; none
    since it had nothing to decode."""

    def __init__(self, gaps: TokenGaps) -> None:
        self._gaps = gaps
        self._last_s: float | None = None
        self._tokens = 0

    def took(self, now: float, tokens: int) -> None:
        """A frame with tokens came. A stream that began with it has no gap yet, so no more are
        counted than came before."""
        if self._last_s is not None:
            self._gaps.add(now - self._last_s, min(tokens, self._tokens))
        self._last_s, self._tokens = now, tokens

    def rest(self) -> None:
        """No stream is left: what comes next follows no token."""
        self._last_s = None


class GapCollector(Collector):
    """By model, as `pdserve_inter_token_latency_seconds`."""

    def __init__(self, gaps: Mapping[str, TokenGaps]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "pdserve_inter_token_latency_seconds",
            "Time since the worker's step before that brought tokens, for each token.",
            labels=("model",),
        )
        bounds = [*map(floatToGoString, (*BOUNDS_S, float("inf")))]
        for model, gaps in sorted(self._gaps.items()):
            counts = list(zip(bounds, map(float, accumulate(gaps.counts)), strict=True))
            family.add_metric((model,), counts, gaps.sum_s)
        yield family
