"""Charts as marks of an inline SVG, which `report.html.j2` writes: nothing to load or to run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH: Final = 560
HEIGHT: Final = 300
WIDE: Final = 2 * WIDTH
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 44
_NAMES: Final = 96  # the space left of bars
_LEAST_WIDTH: Final = 0.6  # of a span
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """One SVG element. The `class` attribute of what shows data is its colour."""

    name: str
    attributes: Mapping[str, str | float]
    text: str = ""
    hint: str = ""


def mark(name: str, kind: str, text: str = "", hint: str = "", **attributes: Any) -> Mark:
    """Make an element of the CSS class `kind`; a pointer that rests on it shows `hint`."""
    numbers = {
        key: f"{x:.2f}".rstrip("0").rstrip(".") if isinstance(x, int | float) else x
        for key, x in attributes.items()
    }
    return Mark(name, numbers | {"class": kind}, text, hint)


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG element that is as wide as its place."""

    title: str
    marks: Sequence[Mark]
    width: float = WIDTH
    height: float = HEIGHT


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


def _x_axis(x: Scale, title: str, *, top: float, height: float, ticks: int = 5) -> list[Mark]:
    bottom = height - _BOTTOM
    marks = [mark("text", "title middle", title, x=(x.start + x.end) / 2, y=height - 8)]
    for at, text in x.ticks(ticks):
        marks.append(mark("line", "grid", x1=at, x2=at, y1=top, y2=bottom))
        marks.append(mark("text", "tick middle", text, x=at, y=bottom + 16))
    return marks


@dataclass(frozen=True, slots=True)
class Axis:
    """The title of an axis and the values that it must have room for."""

    title: str
    values: Sequence[float]
    is_log: bool = False

    def scale(self, start: float, end: float) -> Scale:
        return (logarithmic if self.is_log else linear)(self.values, start, end)


class Chart:
    """A chart with two axes. The `kind` of a mark is its CSS class."""

    def __init__(self, x: Axis, y: Axis, *, title: str) -> None:
        self.x = x.scale(_LEFT, WIDTH - _RIGHT)
        self.y = y.scale(HEIGHT - _BOTTOM, _TOP)
        self._title = title
        right, bottom, middle = WIDTH - _RIGHT, HEIGHT - _BOTTOM, (_TOP + HEIGHT - _BOTTOM) / 2
        self._marks = _x_axis(self.x, x.title, top=_TOP, height=HEIGHT)
        for at, text in self.y.ticks():
            self._marks.append(mark("line", "grid", x1=_LEFT, x2=right, y1=at, y2=at))
            self._marks.append(mark("text", "tick end", text, x=_LEFT - 8, y=at + 4))
        turned = f"rotate(-90 13 {middle:g})"
        self._marks += [
            mark("text", "title middle", y.title, x=13, y=middle, transform=turned),
            mark("line", "axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom),
        ]

    def line(self, points: Sequence[Point], kind: str) -> None:
        if points:
            places = " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)
            self._marks.append(mark("polyline", f"line {kind}", points=places))

    def steps(self, points: Sequence[Point], kind: str) -> None:
        """Draw a line that keeps its height until the next point."""
        corners: list[Point] = []
        for point in points:
            if corners:
                corners.append((point[0], corners[-1][1]))
            corners.append(point)
        self.line(corners, kind)

    def dots(self, points: Sequence[Point], kind: str, hints: Sequence[str]) -> None:
        for (x, y), hint in zip(points, hints, strict=True):
            place: dict[str, Any] = {"cx": self.x.at(x), "cy": self.y.at(y), "r": 3}
            self._marks.append(mark("circle", f"dot {kind}", hint=hint, **place))

    def limit(self, value: float | None, text: str, *, on_x: bool = False) -> None:
        """Draw a line across the chart with its meaning; nothing for None or beyond the axis."""
        axis = self.x if on_x else self.y
        if value is None or value > axis.high:
            return
        at = axis.at(value)
        ends: dict[str, Any]
        place: dict[str, Any]
        if on_x:
            ends = {"x1": at, "x2": at, "y1": _TOP, "y2": HEIGHT - _BOTTOM}
            place = {"x": at - 4, "y": _TOP + 10}
        else:
            ends = {"x1": _LEFT, "x2": WIDTH - _RIGHT, "y1": at, "y2": at}
            place = {"x": WIDTH - _RIGHT - 4, "y": at - 4}
        self._marks.append(mark("line", "mark", **ends))
        self._marks.append(mark("text", "note end", text, **place))

    def picture(self) -> Picture:
        return Picture(self._title, self._marks)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the axis; `kind` is its CSS class."""

    start: float
    end: float
    kind: str
    hint: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars by name, each of spans. Bars of one name that overlap get rows of their
    own."""

    title: str
    unit: str
    bars: Mapping[str, Sequence[Sequence[Span]]]
    end: float
    width: float = WIDTH
    row: float = 34
    gap: float = 14

    def picture(self) -> Picture:
        placed = {name: _pack(found) for name, found in self.bars.items()}
        heights = {
            name: self.row * (1 + max((row for row, _ in found), default=0))
            for name, found in placed.items()
        }
        height = 8 + sum(heights.values()) + self.gap * len(placed) + _BOTTOM
        x = Scale(0.0, self.end or 1.0, _NAMES, self.width - _RIGHT)
        marks = _x_axis(x, self.unit, top=8, height=height, ticks=6)
        top = 8 + self.gap / 2
        for name, found in placed.items():
            middle, under = top + heights[name] / 2, top + heights[name] + self.gap / 2
            marks.append(mark("text", "tick end strong", name, x=_NAMES - 10, y=middle + 4))
            marks.append(mark("line", "grid", x1=_NAMES, x2=x.end, y1=under, y2=under))
            for row, spans in found:
                for span in spans:
                    left = x.at(span.start)
                    box: dict[str, Any] = {
                        "x": left,
                        "y": top + row * self.row,
                        "height": self.row - 1,
                    }
                    box["width"] = max(_LEAST_WIDTH, x.at(span.end) - left)
                    marks.append(mark("rect", f"bar {span.kind}", hint=span.hint, **box))
            top += heights[name] + self.gap
        return Picture(self.title, marks, self.width, height)


def _pack(bars: Sequence[Sequence[Span]]) -> list[tuple[int, Sequence[Span]]]:
    """Give each bar the first row that is free when it starts."""
    free_at: list[float] = []
    placed = []
    for spans in sorted((spans for spans in bars if spans), key=lambda x: x[0].start):
        row = next((i for i, at in enumerate(free_at) if at <= spans[0].start), len(free_at))
        free_at[row : row + 1] = [spans[-1].end]
        placed.append((row, spans))
    return placed
