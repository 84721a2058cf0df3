"""A chart with two axes, and the marks in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.plot.scale import Scale, label, linear, logarithmic
from benchmarks.plot.svg import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 560
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 44
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows: its title, and values that it must have room for."""

    title: str
    values: tuple[float, ...]
    is_log: bool = False

    def scale(self, start: float, end: float) -> Scale:
        """The axis laid out between two places."""
        values = list(self.values)
        if self.is_log:
            return logarithmic(values, start=start, end=end)
        return linear(values, start=start, end=end)


class Chart:
    """Collects marks; :meth:`svg` gives the picture. ``kind`` of a mark is its CSS class."""

    def __init__(self, x: Axis, y: Axis, *, title: str) -> None:
        self._x_axis, self._y_axis, self._title = x, y, title
        self.x = x.scale(_LEFT, WIDTH - _RIGHT)
        self.y = y.scale(HEIGHT - _BOTTOM, _TOP)
        self._marks: list[Markup] = []

    def line(self, points: Sequence[Point], kind: str) -> None:
        """A line through points, in their order."""
        if points:
            self._marks.append(tag("polyline", points=self._places(points), class_=f"line {kind}"))

    def steps(self, points: Sequence[Point], kind: str) -> None:
        """A line that keeps its height until the next point, as a distribution's does."""
        corners: list[Point] = []
        for point in points:
            if corners:
                corners.append((point[0], corners[-1][1]))
            corners.append(point)
        self.line(corners, kind)

    def dots(self, points: Sequence[Point], kind: str, titles: Sequence[str] = ()) -> None:
        """A dot at each point; ``titles`` are shown when a pointer rests on them."""
        for number, (x, y) in enumerate(points):
            hint = (tag("title", titles[number]),) if titles else ()
            self._marks.append(
                tag("circle", *hint, cx=self.x.at(x), cy=self.y.at(y), r=3, class_=f"dot {kind}")
            )

    def level(self, value: float, text: str) -> None:
        """A line across at a height, with what it means."""
        y = self.y.at(value)
        self._marks += [
            tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="mark"),
            tag("text", text, x=WIDTH - _RIGHT - 4, y=y - 4, class_="note end"),
        ]

    def limit(self, value: float, text: str) -> None:
        """A line from top to bottom at a value, with what it means."""
        x = self.x.at(value)
        self._marks += [
            tag("line", x1=x, x2=x, y1=_TOP, y2=HEIGHT - _BOTTOM, class_="mark"),
            tag("text", text, x=x - 4, y=_TOP + 10, class_="note end"),
        ]

    def svg(self) -> Markup:
        """The whole picture."""
        return picture(
            join([*self._grid(), *self._marks, *self._titles()]), HEIGHT, title=self._title
        )

    def _grid(self) -> list[Markup]:
        left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
        parts = []
        for value in self.y.ticks():
            y = self.y.at(value)
            parts += [
                tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"),
                tag("text", label(value), x=left - 8, y=y + 4, class_="tick end"),
            ]
        for value in self.x.ticks():
            x = self.x.at(value)
            parts += [
                tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"),
                tag("text", label(value), x=x, y=bottom + 16, class_="tick middle"),
            ]
        return [*parts, tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]

    def _titles(self) -> list[Markup]:
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        y = (_TOP + HEIGHT - _BOTTOM) / 2
        turned = f"rotate(-90 13 {y:g})"
        return [
            tag("text", self._x_axis.title, x=middle, y=HEIGHT - 8, class_="title middle"),
            tag("text", self._y_axis.title, x=13, y=y, transform=turned, class_="title middle"),
        ]

    def _places(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)


def picture(inside: Markup, height: float, *, title: str, width: float = WIDTH) -> Markup:
    """An SVG element as wide as its place, with a name for those who cannot see it."""
    return tag(
        "svg",
        inside,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
    )
