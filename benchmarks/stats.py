"""Percentiles, bootstrap intervals, and measurement of variants in alternating rounds."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

T = TypeVar("T")
RESAMPLES: Final = 2000
MIN_ROUNDS: Final = 3  # an interval over fewer rounds is meaningless
WARMUP: Final = -1  # the number of the warm-up round, whose results are dropped


@dataclass(frozen=True, slots=True)
class Distribution:
    """Size, mean, percentiles and extremes of a sample, in the sample's unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over rounds with its 95 % interval. With fewer than `MIN_ROUNDS` rounds there is no
    interval."""

    value: float
    low: float | None = None
    high: float | None = None


def percentiles(sample: Sequence[float], *percents: float) -> list[float]:
    """Return percentiles with linear interpolation. If the sample has infinities, return the next
    higher value instead."""
    method = "higher" if math.isinf(max(sample)) else "linear"
    found: list[float] = np.percentile(sample, percents, method=method).tolist()  # type: ignore[call-overload]
    return found


def distribution(sample: Sequence[float]) -> Distribution | None:
    """Return the distribution of a sample, or None if it is empty."""
    if not sample:
        return None
    mean = math.fsum(sample) / len(sample)
    return Distribution(len(sample), mean, *percentiles(sample, 0, 50, 90, 95, 99, 100))


def estimate(rounds: Sequence[float], key: str) -> Estimate:
    """Return the median of one value per round, with an interval from resampled rounds.

    Requests of one round influence each other, so whole rounds are resampled (block bootstrap;
    Efron and Tibshirani, An Introduction to the Bootstrap, ch. 8). `key` seeds the resampling.
    """
    (middle,) = percentiles(rounds, 50)
    if len(rounds) < MIN_ROUNDS:
        return Estimate(middle)
    draw = np.random.default_rng(zlib.crc32(key.encode()))
    drawn = draw.choice(np.asarray(rounds), (RESAMPLES, len(rounds)))
    return Estimate(middle, *percentiles(np.median(drawn, axis=1).tolist(), 2.5, 97.5))


def ratio(rounds: Sequence[tuple[float, float]], key: str) -> Estimate | None:
    """Return the median of one quotient per round, or None if a quotient is not finite."""
    if any(bottom == 0 or math.isinf(top) or math.isinf(bottom) for top, bottom in rounds):
        return None
    return estimate([top / bottom for top, bottom in rounds], key)


async def alternate(
    variants: Sequence[str],
    rounds: int,
    measure: Callable[[str, int], Awaitable[T]],
    *,
    first: int = 0,
    warm_up: bool = True,
) -> AsyncIterator[dict[str, T]]:
    """Yield the measurements of each round by variant, from round `first` on.

    If the machine slows down during a run, all variants of a round are affected equally. To ensure
    this, the order within a round alternates (A B, B A, ...). The first round is `WARMUP`, which is
    not yielded.
    """
    if warm_up:
        for name in variants:
            await measure(name, WARMUP)
    for number in range(first, rounds):
        order = variants if number % 2 == 0 else variants[::-1]
        found = {name: await measure(name, number) for name in order}
        yield {name: found[name] for name in variants}


def compare(
    rounds: Sequence[Mapping[str, float]], baseline: str
) -> dict[str, tuple[float, float | None]]:
    """Compare one metric, given by variant for each round.

    Return (median, median ratio to the baseline) by variant. The baseline's ratio is None.
    """
    found = {}
    for name in rounds[0]:
        quotient = ratio([(each[name], each[baseline]) for each in rounds], name)
        (median,) = percentiles([each[name] for each in rounds], 50)
        found[name] = (median, quotient.value if quotient and name != baseline else None)
    return found
