"""Measure variants in alternating rounds and compare them round by round.

All benchmarks that compare use this: a machine that slows down during a run slows all variants of
a round alike, and the order within a round alternates (A B, B A, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.table import Table

from benchmarks.stats import Estimate, estimate, ratio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from rich.console import Console

T = TypeVar("T")
WARMUP: Final = -1  # the number of the round whose results are dropped


def in_turn(variants: Sequence[str], number: int) -> list[str]:
    """Return the order of a round."""
    return list(variants) if number % 2 == 0 else list(reversed(variants))


async def alternate(
    variants: Sequence[str],
    rounds: int,
    measure: Callable[[str, int], Awaitable[T]],
    *,
    first: int = 0,
    warm_up: bool = True,
) -> AsyncIterator[tuple[int, dict[str, T]]]:
    """Yield (number, measurement by variant) after each round from `first` on.

    A warm-up round goes before them. It is measured as round `WARMUP` and not yielded.
    """
    if warm_up:
        for name in variants:
            await measure(name, WARMUP)
    for number in range(first, rounds):
        found = {name: await measure(name, number) for name in in_turn(variants, number)}
        yield number, {name: found[name] for name in variants}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one variant over all rounds. `ratio` is to the baseline, None for itself."""

    median: Estimate
    ratio: Estimate | None


def compare(
    rounds: Sequence[Mapping[str, float]], baseline: str, key: str = ""
) -> dict[str, Comparison]:
    """Compare one metric, given by variant for each round."""
    found = {}
    for name in rounds[0]:
        median = estimate([each[name] for each in rounds], f"{key}/{name}")
        assert median is not None
        pairs = [(each[name], each[baseline]) for each in rounds]
        found[name] = Comparison(
            median, None if name == baseline else ratio(pairs, f"{key}/{name}/ratio")
        )
    return found


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str = "",
    caption: str = "",
) -> None:
    """Print a table with its first column on the left and numbers on the right."""
    table = Table(
        title=title or None, caption=caption or None, title_justify="left", caption_justify="left"
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else number_text(cell) for cell in row))
    console.print(table)


def number_text(value: Any) -> str:
    """Write a number with three significant digits, and an estimate with its interval."""
    if value is None:
        return "-"
    if isinstance(value, Estimate):
        text = number_text(value.value)
        if value.low is None or value.high is None:
            return text
        return f"{text} [{number_text(value.low)}, {number_text(value.high)}]"
    if isinstance(value, int):
        return f"{value:,}"
    if value == float("inf"):
        return "inf"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
