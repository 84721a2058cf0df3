"""Whether processes grow: resident memory over time, and its slope."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIB: Final = 1 << 20
# What a process takes while it warms up is no growth.
_WARM_UP: Final = 0.25
# A slope is told from noise in a run of so many seconds. It may be so steep, in MiB an hour: at six
# requests a second 3 KiB of each.
JUDGED_S: Final = 1200.0
STEEPEST: Final = 64.0


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


def too_steep(slopes: Mapping[str, float], seconds: float) -> list[str]:
    """The processes that grow too fast, where the run was long enough to say so."""
    if seconds < JUDGED_S:
        return []
    return [
        f"{name} grew by {slope:g} MiB an hour; {STEEPEST:g} is the most"
        for name, slope in slopes.items()
        if slope > STEEPEST
    ]


def _slope(samples: list[tuple[float, int]]) -> float:
    """Bytes a second."""
    count = len(samples)
    mean_s = sum(at for at, _ in samples) / count
    mean = sum(rss for _, rss in samples) / count
    spread = sum((at - mean_s) ** 2 for at, _ in samples)
    if not spread:
        return 0.0
    return sum((at - mean_s) * (rss - mean) for at, rss in samples) / spread
