"""Times small functions side by side."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROUND_S = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time: `run` does it once and is told how often it was called before."""

    name: str
    workers: int
    run: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """µs a call, by round; a round's figure is its mean."""

    name: str
    workers: int
    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)

    @property
    def fastest_us(self) -> float:
        return min(self.rounds_us)


def timed(cases: Sequence[Case], rounds: int) -> Iterator[Timed]:
    """The cases take turns in each round, so that what else the machine does strikes them alike.
    Garbage is collected between cases, not in them."""
    calls = [0] * len(cases)
    found: list[list[float]] = [[] for _ in cases]
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for index, case in enumerate(cases):
                gc.collect()
                before = calls[index]
                start = now = time.perf_counter()
                while now - start < ROUND_S:
                    case.run(calls[index])
                    calls[index] += 1
                    now = time.perf_counter()
                found[index].append((now - start) / (calls[index] - before) * 1e6)
    finally:
        if enabled:
            gc.enable()
    for case, rounds_us in zip(cases, found, strict=True):
        yield Timed(case.name, case.workers, tuple(rounds_us))
