"""Scales and marks: places that can be worked out by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plot.bars import Span, lanes, stacked
from benchmarks.plot.chart import Axis, Chart
from benchmarks.plot.scale import Scale, label, linear, logarithmic, nice_step
from benchmarks.plot.svg import Markup, tag

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def test_a_scale_puts_values_where_they_belong() -> None:
    scale = Scale(0, 10, 100, 200)
    assert [scale.at(value) for value in (0, 5, 10, 11, -1)] == [100, 150, 200, 200, 100]
    by_ratio = Scale(1, 100, 0, 200, is_log=True)
    assert [by_ratio.at(value) for value in (1, 10, 100, 0)] == pytest.approx([0, 100, 200, 0])


def test_ticks_are_round() -> None:
    assert linear([3, 47], start=0, end=1).ticks() == [0, 10, 20, 30, 40, 50]
    assert linear([], start=0, end=1).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert logarithmic([3, 70], start=0, end=1).ticks() == pytest.approx([2, 5, 10, 20, 50, 100])
    assert logarithmic([0.02, 900], start=0, end=1).ticks() == pytest.approx(
        [0.1, 1, 10, 100, 1000]
    )
    assert [label(value) for value in (0.5, 20.0, 1500.0, 0.1 + 0.2)] == [
        "0.5",
        "20",
        "1.5k",
        "0.3",
    ]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_a_scale_has_room_for_all_its_values(values: list[float]) -> None:
    for scale in (linear(values, start=0, end=1), logarithmic(values, start=0, end=1)):
        assert scale.low <= min(values) * (1 + 1e-9)
        assert scale.high >= max(values) * (1 - 1e-9)
        assert 1 <= len(scale.ticks()) <= 14


@given(st.floats(1e-9, 1e9))
def test_a_step_is_the_next_nice_one(rough: float) -> None:
    step = nice_step(rough)
    assert rough * (1 - 1e-9) <= step <= rough * 2.51


def test_text_and_attributes_are_escaped() -> None:
    made = tag("p", "a < b & c", title='"x"', data_x=None, class_="k")
    assert made == '<p title="&quot;x&quot;" class="k">a &lt; b &amp; c</p>'
    assert tag("p", Markup("<b></b>")) == "<p><b></b></p>"


def test_a_chart_has_its_axes_and_marks() -> None:
    chart = Chart(Axis("seconds", (0.0, 10.0)), Axis("ms", (0.0, 100.0)), title="a <chart>")
    chart.steps([(0, 0), (5, 50), (10, 100)], "arm0")
    chart.dots([(5, 50)], "arm1", ["five & fifty"])
    chart.level(90, "limit")
    chart.limit(2, "here")
    root = parsed(chart.svg())
    assert root.get("aria-label") == "a <chart>"
    texts = [x.text for x in root.iter(f"{SVG}text")]
    assert {"seconds", "ms", "limit", "here", "0", "10", "100"} <= set(texts)
    line = next(root.iter(f"{SVG}polyline"))
    assert (line.get("class"), len(str(line.get("points")).split())) == ("line arm0", 5)
    dot = next(root.iter(f"{SVG}circle"))
    assert float(str(dot.get("cx"))) == pytest.approx((chart.x.start + chart.x.end) / 2)
    assert next(dot.iter(f"{SVG}title")).text == "five & fifty"


def test_stacked_pieces_lie_end_to_end() -> None:
    root = parsed(stacked({"a": [("queue", 10), ("decode", 30)]}, unit="ms", title="t"))
    first, second = root.iter(f"{SVG}rect")
    left, width = float(str(first.get("x"))), float(str(first.get("width")))
    assert float(str(second.get("x"))) == pytest.approx(left + width, abs=0.01)
    assert float(str(second.get("width"))) == pytest.approx(3 * width, abs=0.02)


def test_requests_that_overlap_get_rows_of_their_own() -> None:
    def request(start: float, end: float) -> list[Span]:
        return [Span(start, end, "decode", "h")]

    rows = {"w": [request(0, 2), request(1, 3), request(2, 4)], "idle": []}
    root = parsed(lanes(rows, end_s=4, title="t"))
    heights = [float(str(x.get("y"))) for x in root.iter(f"{SVG}rect")]
    assert heights[0] == heights[2]
    assert heights[1] > heights[0]
    assert {"w", "idle"} <= {x.text for x in root.iter(f"{SVG}text")}
