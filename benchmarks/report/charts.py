"""Geometry of charts. `report.html.j2` draws them as inline SVG without scripts or external
files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Point = tuple[float, float]
    # (CSS class, points). A dot is (x, y, tooltip).
    Line = tuple[str, Sequence[Point]]
    Dots = tuple[str, Sequence[tuple[float, float, str]]]

WIDTH: Final = 560
HEIGHT: Final = 300
_RIGHT, _BOTTOM = 14, 44  # margins


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that maps `low`..`high` to `start`..`end` in pixels, logarithmically if `is_log`."""

    title: str
    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in pixels. A value out of range is clamped."""
        low, high, here = self.low, self.high, value
        if self.is_log:
            low, high, here = math.log(low), math.log(high), math.log(max(value, low * 1e-6))
        share = min(1.0, max(0.0, (here - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Return (position, text) of about `count` round values."""
        if self.is_log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if high - low < 3 else (1,)
            found = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
            found = [x for x in found if self.low * (1 - 1e-9) <= x <= self.high * (1 + 1e-9)]
        else:
            step = _nice(self.high / count)
            found = [n * step for n in range(math.floor(self.high / step + 1e-9) + 1)]
        return [(self.at(x), f"{x / 1000:g}k" if abs(x) >= 1000 else f"{x:.10g}") for x in found]


def _axis(
    title: str, values: Sequence[float], start: float, end: float, *, is_log: bool = False
) -> Axis:
    """Return an axis from 0 to the largest value, or a logarithmic one for values above 0."""
    high = max(values, default=0.0) or 1.0
    if is_log:
        least = min(x for x in values if x > 0)
        low = next(x for x in (_nice(least), _nice(least / 2), _nice(least / 2.5)) if x <= least)
        return Axis(title, low, max(_nice(high), low * 10), start, end, is_log=True)
    step = _nice(high / 5)
    return Axis(title, 0.0, math.ceil(high / step - 1e-9) * step, start, end)


def _nice(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(x * power for x in (1, 2, 5, 10) if x * power >= rough * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines and dots between two axes. `limits` are (position in pixels, True if on the x axis,
    text)."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    dots: Sequence[Dots]
    limits: list[tuple[float, bool, str]] = field(default_factory=list)
    width: float = WIDTH
    height: float = HEIGHT

    def limit(self, value: float | None, text: str, *, on_x: bool = False) -> None:
        """Add a labelled limit line across the chart. Skip None and values beyond the axis."""
        axis = self.x if on_x else self.y
        if value is not None and value <= axis.high:
            self.limits.append((axis.at(value), on_x, text))


def chart(
    x_title: str,
    y_title: str,
    lines: Sequence[Line] = (),
    dots: Sequence[Dots] = (),
    *,
    y_end: float = 0.0,
    is_log: bool = False,
) -> Chart:
    """Return a chart with axes that include all points. With `is_log` the x axis is logarithmic."""
    places = [point for _, points in lines for point in points]
    places += [(x, y) for _, marks in dots for x, y, _ in marks]
    x = _axis(x_title, [x for x, _ in places], 54, WIDTH - _RIGHT, is_log=is_log)
    y = _axis(y_title, [y_end, *(y for _, y in places)], HEIGHT - _BOTTOM, 12)
    return Chart(x, y, lines, dots)


def steps(points: Sequence[Point]) -> list[Point]:
    """Return the corners of a step line, which keeps its value until the next point."""
    corners: list[Point] = []
    for point in points:
        if corners:
            corners.append((point[0], corners[-1][1]))
        corners.append(point)
    return corners


@dataclass(frozen=True, slots=True)
class ChartInterval:
    """An interval on the axis. `kind` is its CSS class."""

    start: float
    end: float
    kind: str
    hint: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars. A lane is (name, y of its middle, y of its end, (y of top, span)s)."""

    x: Axis
    row: float
    width: float
    height: float
    lanes: Sequence[tuple[str, float, float, Sequence[tuple[float, ChartInterval]]]]


def bars(
    unit: str,
    found: Mapping[str, Sequence[Sequence[ChartInterval]]],
    end: float,
    *,
    is_wide: bool = False,
) -> Bars:
    """Return the bars of each name. Overlapping bars of one name are in separate rows."""
    row, gap, width = (9, 12, 2 * WIDTH) if is_wide else (34, 14, WIDTH)
    lanes = []
    top = 8 + gap / 2
    for name, of_name in found.items():
        free_at: list[float] = []
        placed = []
        for spans in sorted(of_name, key=lambda x: x[0].start):
            place = next((i for i, at in enumerate(free_at) if at <= spans[0].start), len(free_at))
            free_at[place : place + 1] = [spans[-1].end]
            placed += [(top + place * row, span) for span in spans]
        height = row * len(free_at)
        lanes.append((name, top + height / 2, top + height + gap / 2, placed))
        top += height + gap
    x = Axis(unit, 0.0, end or 1.0, 96, width - _RIGHT)
    return Bars(x, row, width, top - gap / 2 + _BOTTOM, lanes)
