"""Charts as inline SVG: nothing to load and nothing to run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

WIDTH: Final = 560
HEIGHT: Final = 300
Point = tuple[float, float]


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """Make one element. Children that are not Markup are escaped; attributes of None are left out;
    `_` in a name becomes `-` (`class_` becomes `class`)."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(x if isinstance(x, Markup) else escape(x, quote=False) for x in children)
    return Markup(f"<{name}{given}>{inside}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


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

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values."""
        if self.is_log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if high - low < 3 else (1,)
            found = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
            return [x for x in found if self.low * (1 - 1e-9) <= x <= self.high * (1 + 1e-9)]
        step = _nice((self.high - self.low) / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

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


def _label(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:.10g}"


def picture(inside: Markup, height: float, *, title: str, width: float = WIDTH) -> Markup:
    """Make an SVG element that is as wide as its place."""
    return tag(
        "svg",
        inside,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
    )


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

    _LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 44

    def __init__(self, x: Axis, y: Axis, *, title: str) -> None:
        self._x_axis, self._y_axis, self._title = x, y, title
        self.x = x.scale(self._LEFT, WIDTH - self._RIGHT)
        self.y = y.scale(HEIGHT - self._BOTTOM, self._TOP)
        self._marks: list[Markup] = []

    def line(self, points: Sequence[Point], kind: str) -> None:
        if points:
            places = " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)
            self._marks.append(tag("polyline", points=places, class_=f"line {kind}"))

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
            place = {"cx": self.x.at(x), "cy": self.y.at(y)}
            self._marks.append(
                tag("circle", tag("title", hint), **place, r=3, class_=f"dot {kind}")
            )

    def level(self, value: float, text: str) -> None:
        """Draw a horizontal line with its meaning."""
        y, right = self.y.at(value), WIDTH - self._RIGHT
        self._marks += [
            tag("line", x1=self._LEFT, x2=right, y1=y, y2=y, class_="mark"),
            tag("text", text, x=right - 4, y=y - 4, class_="note end"),
        ]

    def limit(self, value: float, text: str) -> None:
        """Draw a vertical line with its meaning."""
        x = self.x.at(value)
        self._marks += [
            tag("line", x1=x, x2=x, y1=self._TOP, y2=HEIGHT - self._BOTTOM, class_="mark"),
            tag("text", text, x=x - 4, y=self._TOP + 10, class_="note end"),
        ]

    def svg(self) -> Markup:
        left, right = self._LEFT, WIDTH - self._RIGHT
        top, bottom = self._TOP, HEIGHT - self._BOTTOM
        parts = []
        for value in self.y.ticks():
            y = self.y.at(value)
            parts += [
                tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"),
                tag("text", _label(value), x=left - 8, y=y + 4, class_="tick end"),
            ]
        for value in self.x.ticks():
            x = self.x.at(value)
            parts += [
                tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"),
                tag("text", _label(value), x=x, y=bottom + 16, class_="tick middle"),
            ]
        middle, turned = (left + right) / 2, f"rotate(-90 13 {(top + bottom) / 2:g})"
        titles = [
            tag("text", self._x_axis.title, x=middle, y=HEIGHT - 8, class_="title middle"),
            tag(
                "text",
                self._y_axis.title,
                x=13,
                y=(top + bottom) / 2,
                transform=turned,
                class_="title middle",
            ),
        ]
        axis = tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")
        return picture(join([*parts, axis, *self._marks, *titles]), HEIGHT, title=self._title)


# -- horizontal bars

_B_LEFT, _B_RIGHT, _B_TOP, _B_BOTTOM = 96, 14, 8, 42
_BAR, _GAP = 34, 14
_ROW, _LANE_GAP = 9, 12
_LEAST_WIDTH: Final = 0.6
_WIDE: Final = 2 * WIDTH


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; `kind` is its CSS class."""

    start_s: float
    end_s: float
    kind: str
    hint: str


def stacked(bars: Mapping[str, Sequence[tuple[str, float]]], *, unit: str, title: str) -> Markup:
    """Draw one bar for each name, of (CSS class, value) pieces end to end."""
    totals = [sum(value for _, value in pieces) for pieces in bars.values()]
    x = linear(totals, _B_LEFT, WIDTH - _B_RIGHT)
    height = _B_TOP + len(bars) * (_BAR + _GAP) + _B_BOTTOM
    parts = _time_grid(x, height, unit)
    for number, (name, pieces) in enumerate(bars.items()):
        y = _B_TOP + _GAP / 2 + number * (_BAR + _GAP)
        at = {"x": _B_LEFT - 10, "y": y + _BAR / 2 + 4}
        parts.append(tag("text", name, **at, class_="tick end strong"))
        done = 0.0
        for kind, value in pieces:
            left, right = x.at(done), x.at(done + value)
            box = {"x": left, "y": y, "width": right - left, "height": _BAR}
            hint = tag("title", f"{kind}: {value:.1f} {unit}")
            parts.append(tag("rect", hint, **box, class_=f"bar {kind}"))
            done += value
    return picture(join(parts), height, title=title)


def lanes(rows: Mapping[str, Sequence[Sequence[Span]]], *, end_s: float, title: str) -> Markup:
    """Draw requests by lane; each request is a sequence of spans. Requests that overlap get rows of
    their own within the lane."""
    placed = {name: _pack(requests) for name, requests in rows.items()}
    heights = {
        name: max((row + 1 for row, _ in found), default=1) * _ROW for name, found in placed.items()
    }
    height = _B_TOP + sum(heights.values()) + _LANE_GAP * len(rows) + _B_BOTTOM
    x = Scale(0.0, end_s or 1.0, _B_LEFT, _WIDE - _B_RIGHT)
    parts = _time_grid(x, height, "s since the round began")
    top = _B_TOP + _LANE_GAP / 2
    for name, found in placed.items():
        at = {"x": _B_LEFT - 10, "y": top + heights[name] / 2 + 4}
        parts.append(tag("text", name, **at, class_="tick end strong"))
        y = top + heights[name] + _LANE_GAP / 2
        parts.append(tag("line", x1=_B_LEFT, x2=_WIDE - _B_RIGHT, y1=y, y2=y, class_="grid"))
        for row, spans in found:
            for span in spans:
                left = x.at(span.start_s)
                box = {"x": left, "y": top + row * _ROW, "height": _ROW - 1}
                box["width"] = max(_LEAST_WIDTH, x.at(span.end_s) - left)
                parts.append(tag("rect", tag("title", span.hint), **box, class_=f"bar {span.kind}"))
        top += heights[name] + _LANE_GAP
    return picture(join(parts), height, title=title, width=_WIDE)


def _pack(requests: Sequence[Sequence[Span]]) -> list[tuple[int, Sequence[Span]]]:
    """Give each request the first row that is free when it starts."""
    free_at: list[float] = []
    placed = []
    for spans in sorted((spans for spans in requests if spans), key=lambda x: x[0].start_s):
        row = next((i for i, at_s in enumerate(free_at) if at_s <= spans[0].start_s), len(free_at))
        free_at[row : row + 1] = [spans[-1].end_s]
        placed.append((row, spans))
    return placed


def _time_grid(x: Scale, height: float, unit: str) -> list[Markup]:
    bottom = height - _B_BOTTOM
    parts = []
    for value in x.ticks(6):
        at = x.at(value)
        parts += [
            tag("line", x1=at, x2=at, y1=_B_TOP, y2=bottom, class_="grid"),
            tag("text", _label(value), x=at, y=bottom + 16, class_="tick middle"),
        ]
    middle = (x.start + x.end) / 2
    return [*parts, tag("text", unit, x=middle, y=height - 8, class_="title middle")]
