"""Variants take turns, and are compared round by round."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.progress import Progress
from benchmarks.report.tables import Printer, number_text
from benchmarks.stats import WARMUP, alternate, compare

if TYPE_CHECKING:
    import pytest


async def test_rounds_alternate_after_a_warm_up_that_does_not_count() -> None:
    calls: list[tuple[str, int]] = []

    async def measure(name: str, number: int) -> int:
        calls.append((name, number))
        return number

    found = [x async for x in alternate(["a", "b"], 3, measure)]
    assert calls[:2] == [("a", WARMUP), ("b", WARMUP)]
    assert calls[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == [{"a": n, "b": n} for n in range(3)]


async def test_a_run_continues_at_a_round() -> None:
    async def measure(name: str, number: int) -> str:
        return f"{name}{number}"

    found = [x async for x in alternate(["a"], 4, measure, first=2, warm_up=False)]
    assert found == [{"a": "a2"}, {"a": "a3"}]


def test_ratios_are_to_the_baseline() -> None:
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 30.0, "b": 10.0}, {"a": 4.0, "b": 2.0}]
    found = compare(rounds, "b")
    assert (found["a"].ratio, found["a"].median) == (2.0, 4.0)
    assert found["b"].ratio is None


def test_numbers_have_three_digits(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [number_text(x) for x in (None, 3, 1234, 1234.5, 0.12345, float("inf"))]
    assert texts == ["-", "3", "1,234", "1,234", "0.123", "inf"]
    Printer().table(["name", "value"], [["a", 1.5]])
    assert "1.5" in capsys.readouterr().out


def test_progress_is_a_line_every_ten_seconds_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False)) as progress:
        progress.step("round 1")
        progress.begin(100)
        for _ in range(100):
            progress.sent()
            progress.ended(is_ok=True)
        assert out.getvalue() == ""
        progress._next_s = 0.0
        progress.sent()
        progress.sent()
    assert out.getvalue().splitlines() == ["round 1: 1 running, 100 of 100 ended"]
