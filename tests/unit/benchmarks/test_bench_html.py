"""The report: every plot is there, it is well formed, and it loads and runs nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from compared import arm, measured, receipt, record, result, rounds

from benchmarks.compare.html.page import render_page

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult

PD = receipt(moved=1 << 20, prefill="prefill-0", decode="decode-0")
PROBES = [
    measured(
        name,
        number,
        [record(i, ttft_s=0.1 if i < 9 - number else 0.9, receipt=PD) for i in range(10)],
        kind="probe",
        rate_per_s=2.0 * 2**number,
    )
    for number in range(2)
    for name in ("1P1D", "2A")
]
WHOLE = result(
    [*rounds("1P1D", [0.1, 0.12, 0.11], receipt=PD), *rounds("2A", [0.2, 0.22, 0.24]), *PROBES]
)
PLOTS = (
    "TTFT, cumulative",
    "TPOT, cumulative",
    "ITL, cumulative",
    "E2E, cumulative",
    "TTFT over time",
    "ITL over time",
    "Goodput against rate",
    "SLO attainment against rate",
    "Where the time went",
    "KV moved",
    "Requests on workers, 1P1D",
    "Requests on workers, 2A",
)


class Page(HTMLParser):
    """Reads a page strictly: every element is ended, in order."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def plots(self) -> list[str | None]:
        return [attrs.get("aria-label") for tag, attrs in self.elements if tag == "svg"]

    def classes(self) -> set[str]:
        return {name for _, x in self.elements for name in (x.get("class") or "").split()}


def assert_loads_nothing(text: str, page: Page) -> None:
    assert "default-src 'none'" in text
    allowed = {"xmlns", "http-equiv"}
    for tag, attrs in page.elements:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        for name, value in attrs.items():
            assert name not in {"src", "href", "srcset", "action", "data"}
            assert not name.startswith("on")
            assert name in allowed or "//" not in (value or "")
    assert not re.search(r"@import|url\(", text)


def test_every_plot_is_there_and_nothing_is_loaded() -> None:
    text = render_page(WHOLE)
    page = Page(text)
    assert tuple(page.plots()) == PLOTS
    assert_loads_nothing(text, page)
    words = " ".join(page.words)
    for part in ("Valid", "TTFT p50, ms", "1P1D / 2A", "Highest rate with 90% attainment", "limit"):
        assert part in words
    kinds = {"arm0", "arm1", "queue", "prefill", "transfer", "decode", "better"}
    assert kinds <= page.classes()


def test_every_class_is_styled() -> None:
    text = render_page(WHOLE)
    style = text[text.index("<style>") : text.index("</style>")]
    unstyled = {name for name in Page(text).classes() if f".{name}" not in style}
    assert unstyled == set()


def test_an_invalid_run_says_so_first() -> None:
    late = result([*rounds("1P1D", [0.1] * 3, lag_s=0.5), *rounds("2A", [0.2] * 3)])
    page = Page(render_page(late))
    words = " ".join(page.words)
    assert "INVALID" in words
    assert words.index("the client sent late") < words.index("TTFT p50, ms")
    assert "invalid" in page.classes()


def test_names_cannot_inject_markup() -> None:
    bad = "<script>alert(1)</script>"
    whole = result([*rounds(bad, [0.1] * 3), *rounds("2A", [0.2] * 3)], [arm(bad), arm("2A")])
    assert bad not in render_page(whole)
    Page(render_page(whole))


def empty() -> CompareResult:
    return result([measured("1P1D", 0, []), measured("2A", 0, [])], slo_s={})


@pytest.mark.parametrize(
    "whole",
    [
        empty(),
        result([*rounds("1P1D", [0.1]), *rounds("2A", [0.1], receipt=None, chunk_tokens=None)]),
        result(PROBES),
    ],
    ids=["nothing answered", "an endpoint without receipts", "a sweep alone"],
)
def test_what_is_missing_is_said_where_its_plot_would_be(whole: CompareResult) -> None:
    text = render_page(whole)
    page = Page(text)
    assert_loads_nothing(text, page)
    figures = sum(tag == "figure" for tag, _ in page.elements)
    nones = sum(attrs.get("class") == "none" for _, attrs in page.elements)
    assert figures == len(PLOTS)
    assert len(page.plots()) + nones == figures
