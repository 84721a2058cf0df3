"""Whether processes grow: resident memory over time, and its slope."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

_MIB: Final = 1 << 20
# What a process takes while it warms up is no growth.
_WARM_UP: Final = 0.25


class Memory:
    """State: samples by process."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def take(self, name: str, at_s: float, rss_bytes: int) -> None:
        """One sample."""
        self._samples[name].append((at_s, rss_bytes))

    def summary(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """By process: MiB after warming up and at the end, and the slope between in MiB an hour,
        by least squares."""
        ends, slopes = {}, {}
        for name, samples in self._samples.items():
            warm = samples[int(len(samples) * _WARM_UP) :]
            ends[name] = (round(warm[0][1] / _MIB, 1), round(warm[-1][1] / _MIB, 1))
            slopes[name] = round(_slope(warm) * 3600 / _MIB, 2)
        return ends, slopes


def _slope(samples: list[tuple[float, int]]) -> float:
    """Bytes a second."""
    count = len(samples)
    mean_s = sum(at for at, _ in samples) / count
    mean = sum(rss for _, rss in samples) / count
    spread = sum((at - mean_s) ** 2 for at, _ in samples)
    if not spread:
        return 0.0
    return sum((at - mean_s) * (rss - mean) for at, rss in samples) / spread
