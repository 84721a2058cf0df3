"""From values to places in a picture, and the round values to mark there."""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low`` to ``start`` and ``high`` to ``end``, by ratio where ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; one beyond the ends is put at the end."""
        low, high, here = (self._of(x) for x in (self.low, self.high, value))
        share = (here - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About ``count`` round values within the ends."""
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = nice_step((self.high - self.low) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def _of(self, value: float) -> float:
        return math.log(max(value, self.low * 1e-6)) if self.is_log else value


def linear(values: list[float], *, start: float, end: float, from_zero: bool = True) -> Scale:
    """A scale that has room for all of ``values``."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        high = low + 1.0
    step = nice_step((high - low) / 5)
    return Scale(low, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: list[float], *, start: float, end: float) -> Scale:
    """A scale by ratio for ``values`` above 0; one that has none spans 1 to 10."""
    above = [value for value in values if value > 0]
    low, high = (min(above), max(above)) if above else (1.0, 10.0)
    low, high = _round_down(low), _round_up(high)
    return Scale(low, high if high > low else low * 10, start, end, is_log=True)


def nice_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def label(value: float) -> str:
    """A tick's value, short: ``0.5``, ``20``, ``1.5k``."""
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.10g}"


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(step * power for step in _STEPS if step * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    return nice_step(value)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
