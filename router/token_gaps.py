"""The gaps between tokens, counted once a frame: a worker's step brings a token of every stream
that decodes, so the time since the step before is the gap of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.histograms import Histograms

if TYPE_CHECKING:
    from router.histograms import Histogram

BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)


def token_gaps() -> Histograms:
    """By model."""
    return Histograms(
        "pdserve_inter_token_latency_seconds",
        "Time since the worker's step before that brought tokens, for each token.",
        ("model",),
        BOUNDS_S,
    )


class Pace:
    """One worker's frames. State: when the last one with tokens came, and how many they were; none
    since it had nothing to decode."""

    def __init__(self, gaps: Histogram) -> None:
        self._gaps = gaps
        self._last_s: float | None = None
        self._tokens = 0

    def took(self, now: float, tokens: int) -> None:
        """A frame with tokens came. A stream that began with it has no gap yet, so no more are
        counted than came before."""
        if self._last_s is not None:
            self._gaps.observe(now - self._last_s, min(tokens, self._tokens))
        self._last_s, self._tokens = now, tokens

    def rest(self) -> None:
        """No stream is left: what comes next follows no token."""
        self._last_s = None
