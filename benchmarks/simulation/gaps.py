"""Gaps between tokens, counted by length: there are too many to keep."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

_WIDTH: Final = 1.01
_LOG: Final = math.log(_WIDTH)
_NONE: Final = -(10**6)


class Gaps:
    """State: how many gaps fall into each bucket. A bucket is 1 % wide, so that percentiles are
    right to half of that."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, times: int = 1) -> None:
        """`times` gaps of a length."""
        if times:
            self._counts[_bucket(seconds)] += times

    def add_growing(self, first_s: float, growth_s: float, steps: int, times: int) -> None:
        """`times` gaps of each of `steps` lengths, of which each is longer than the last by
        `growth_s`."""
        done = 0
        while done < steps and times:
            bucket = _bucket(first_s + done * growth_s)
            count = steps - done
            if growth_s > 0 and bucket != _NONE:
                limit_s = math.exp((bucket + 1) * _LOG)
                here = math.ceil((limit_s - first_s) / growth_s) - done
                count = min(count, max(1, here))
            self._counts[bucket] += count * times
            done += count

    def percentile(self, percent: float) -> float | None:
        """None where there are no gaps."""
        total = self._counts.total()
        if not total:
            return None
        left = math.ceil(total * percent / 100)
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                break
        return 0.0 if bucket == _NONE else math.exp((bucket + 0.5) * _LOG)

    @property
    def count(self) -> int:
        return self._counts.total()


def _bucket(seconds: float) -> int:
    return math.floor(math.log(seconds) / _LOG) if seconds > 0 else _NONE
