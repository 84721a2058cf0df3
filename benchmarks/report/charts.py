"""Charts as numbers; `report.html.j2` draws them as inline SVG, with nothing to load or to run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH: Final = 560
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 44
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low`..`high` to `start`..`end` in the picture, logarithmically if `is_log`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value; a value outside goes to the end."""
        low, high, here = (self._of(x) for x in (self.low, self.high, value))
        share = min(1.0, max(0.0, (here - low) / (high - low)))
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return the places and texts of about `count` round values."""
        if self.is_log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if high - low < 3 else (1,)
            found = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
            found = [x for x in found if self.low * (1 - 1e-9) <= x <= self.high * (1 + 1e-9)]
        else:
            step = _nice((self.high - self.low) / count)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            found = [n * step for n in range(first, last + 1)]
        return [(self.at(x), f"{x / 1000:g}k" if abs(x) >= 1000 else f"{x:.10g}") for x in found]

    def _of(self, value: float) -> float:
        return math.log(max(value, self.low * 1e-6)) if self.is_log else value


def linear(values: Sequence[float], start: float, end: float) -> Scale:
    """Make a scale from 0 with room for all values."""
    low, high = min(0.0, *values, 0.0), max(values, default=1.0)
    high = high if high > low else low + 1.0
    step = _nice((high - low) / 5)
    return Scale(low, math.ceil(high / step - 1e-9) * step, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Make a logarithmic scale for the values above 0."""
    above = [value for value in values if value > 0] or [1.0, 10.0]
    power = 10.0 ** math.floor(math.log10(min(above)))
    low = max(step * power for step in (1, 2, 5, 10) if step * power <= min(above) * (1 + 1e-9))
    high = _nice(max(above))
    return Scale(low, high if high > low else low * 10, start, end, is_log=True)


def _nice(rough: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Axis:
    """The title of an axis and the values that it must have room for."""

    title: str
    values: Sequence[float]
    is_log: bool = False

    def scale(self, start: float, end: float) -> Scale:
        return (logarithmic if self.is_log else linear)(self.values, start, end)


class Chart:
    """A chart with two axes. The `kind` of a mark is its CSS class. Places are in pixels."""

    width, height = WIDTH, HEIGHT
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM

    def __init__(self, x: Axis, y: Axis, *, title: str) -> None:
        self.title, self.x_title, self.y_title = title, x.title, y.title
        self.x = x.scale(self.left, self.right)
        self.y = y.scale(self.bottom, self.top)
        self.lines: list[tuple[str, str]] = []  # CSS class, points
        self.marks: list[tuple[float, float, str, str]] = []  # x, y, CSS class, hint
        self.limits: list[tuple[float, bool, str]] = []  # place, on the x axis, text

    def line(self, points: Sequence[Point], kind: str) -> None:
        if points:
            places = " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)
            self.lines.append((kind, places))

    def steps(self, points: Sequence[Point], kind: str) -> None:
        """Draw a line that keeps its height until the next point."""
        corners: list[Point] = []
        for point in points:
            if corners:
                corners.append((point[0], corners[-1][1]))
            corners.append(point)
        self.line(corners, kind)

    def dots(self, points: Sequence[Point], kind: str, hints: Sequence[str]) -> None:
        """Draw dots; a pointer that rests on one shows its hint."""
        for (x, y), hint in zip(points, hints, strict=True):
            self.marks.append((self.x.at(x), self.y.at(y), kind, hint))

    def limit(self, value: float | None, text: str, *, on_x: bool = False) -> None:
        """Draw a line across the chart with its meaning; nothing for None or beyond the axis."""
        axis = self.x if on_x else self.y
        if value is not None and value <= axis.high:
            self.limits.append((axis.at(value), on_x, text))


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the axis; `kind` is its CSS class."""

    start: float
    end: float
    kind: str
    hint: str


class Bars:
    """Horizontal bars by name, each of spans. Bars of one name that overlap get rows of their
    own."""

    left, top = 96, 8

    def __init__(
        self,
        title: str,
        unit: str,
        bars: Mapping[str, Sequence[Sequence[Span]]],
        end: float,
        *,
        is_wide: bool = False,
    ) -> None:
        self.title, self.unit = title, unit
        self.row, self.gap, self.width = (9, 12, 2 * WIDTH) if is_wide else (34, 14, WIDTH)
        self.right = self.width - _RIGHT
        self.x = Scale(0.0, end or 1.0, self.left, self.right)
        # Name, top, height, and (start, y, end, CSS class, hint) of each span.
        self.lanes: list[tuple[str, float, float, list[tuple[float, float, float, str, str]]]] = []
        top = self.top + self.gap / 2
        for name, found in bars.items():
            placed = _pack(found)
            height = self.row * (1 + max((row for row, _ in placed), default=0))
            boxes = [
                (self.x.at(x.start), top + row * self.row, self.x.at(x.end), x.kind, x.hint)
                for row, spans in placed
                for x in spans
            ]
            self.lanes.append((name, top, height, boxes))
            top += height + self.gap
        self.bottom = top - self.gap / 2
        self.height = self.bottom + _BOTTOM


def _pack(bars: Sequence[Sequence[Span]]) -> list[tuple[int, Sequence[Span]]]:
    """Give each bar the first row that is free when it starts."""
    free_at: list[float] = []
    placed = []
    for spans in sorted((spans for spans in bars if spans), key=lambda x: x[0].start):
        row = next((i for i, at in enumerate(free_at) if at <= spans[0].start), len(free_at))
        free_at[row : row + 1] = [spans[-1].end]
        placed.append((row, spans))
    return placed
