"""Horizontal bars: stacked ones, and spans of time on lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.plot.chart import WIDTH, picture
from benchmarks.plot.scale import Scale, label, linear
from benchmarks.plot.svg import Markup, join, tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 14, 8, 42
_BAR, _GAP = 34, 14
_ROW, _LANE_GAP = 9, 12
_LEAST_WIDTH: Final = 0.6
# Lanes take the whole page.
_WIDE: Final = 2 * WIDTH


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a lane; ``kind`` is its CSS class, ``hint`` is shown on pointing."""

    start_s: float
    end_s: float
    kind: str
    hint: str


def stacked(bars: Mapping[str, Sequence[tuple[str, float]]], *, unit: str, title: str) -> Markup:
    """One bar for each name, of (CSS class, value) pieces end to end."""
    totals = [sum(value for _, value in pieces) for pieces in bars.values()]
    x = linear(totals, start=_LEFT, end=WIDTH - _RIGHT)
    height = _TOP + len(bars) * (_BAR + _GAP) + _BOTTOM
    parts = _time_grid(x, height, unit)
    for number, (name, pieces) in enumerate(bars.items()):
        y = _TOP + _GAP / 2 + number * (_BAR + _GAP)
        parts.append(tag("text", name, x=_LEFT - 10, y=y + _BAR / 2 + 4, class_="tick end strong"))
        done = 0.0
        for kind, value in pieces:
            left, right = x.at(done), x.at(done + value)
            hint = tag("title", f"{kind}: {value:.1f} {unit}")
            width = right - left
            parts.append(
                tag("rect", hint, x=left, y=y, width=width, height=_BAR, class_=f"bar {kind}")
            )
            done += value
    return picture(join(parts), height, title=title)


def lanes(rows: Mapping[str, Sequence[Sequence[Span]]], *, end_s: float, title: str) -> Markup:
    """Spans by lane: each lane holds requests, a request being spans that share one row. Requests
    that overlap get rows of their own."""
    placed = {name: _pack(requests) for name, requests in rows.items()}
    heights = {name: max(1, _depth(found)) * _ROW for name, found in placed.items()}
    height = _TOP + sum(heights.values()) + _LANE_GAP * len(rows) + _BOTTOM
    x = Scale(0.0, end_s, _LEFT, _WIDE - _RIGHT)
    parts = _time_grid(x, height, "s since the round began")
    top = _TOP + _LANE_GAP / 2
    for name, found in placed.items():
        middle = top + heights[name] / 2 + 4
        parts.append(tag("text", name, x=_LEFT - 10, y=middle, class_="tick end strong"))
        line_y = top + heights[name] + _LANE_GAP / 2
        parts.append(tag("line", x1=_LEFT, x2=_WIDE - _RIGHT, y1=line_y, y2=line_y, class_="grid"))
        for row, spans in found:
            for span in spans:
                parts.append(_span(x, span, top + row * _ROW))
        top += heights[name] + _LANE_GAP
    return picture(join(parts), height, title=title, width=_WIDE)


def _span(x: Scale, span: Span, y: float) -> Markup:
    left = x.at(span.start_s)
    width = max(_LEAST_WIDTH, x.at(span.end_s) - left)
    hint = tag("title", span.hint)
    return tag("rect", hint, x=left, y=y, width=width, height=_ROW - 1, class_=f"bar {span.kind}")


def _pack(requests: Sequence[Sequence[Span]]) -> list[tuple[int, Sequence[Span]]]:
    """Give each request the first row that is free when it starts."""
    free_at: list[float] = []
    placed = []
    for spans in sorted((spans for spans in requests if spans), key=lambda x: x[0].start_s):
        start_s, end_s = spans[0].start_s, spans[-1].end_s
        row = next((i for i, at_s in enumerate(free_at) if at_s <= start_s), len(free_at))
        free_at[row : row + 1] = [end_s]
        placed.append((row, spans))
    return placed


def _depth(placed: Sequence[tuple[int, Sequence[Span]]]) -> int:
    return max((row + 1 for row, _ in placed), default=0)


def _time_grid(x: Scale, height: float, unit: str) -> list[Markup]:
    bottom = height - _BOTTOM
    parts = []
    for value in x.ticks(6):
        at = x.at(value)
        parts += [
            tag("line", x1=at, x2=at, y1=_TOP, y2=bottom, class_="grid"),
            tag("text", label(value), x=at, y=bottom + 16, class_="tick middle"),
        ]
    middle = (x.start + x.end) / 2
    return [*parts, tag("text", unit, x=middle, y=height - 8, class_="title middle")]
