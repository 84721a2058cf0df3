"""Costs of engine steps as sums for a least-squares fit: workers collect them, both fit.

A step is described by five features, each scaled to be near 1, and by its duration:

    1 · prefill tokens / 1e3 · attended pairs / 1e6 · decoding requests / 10 · their context / 1e4

A chunk of m prompt tokens after p others attends to m·(p + m/2) pairs. The sums (moments) have a
fixed size and add up over workers, so a router that has just started can fit at once. A step
weighs by the inverse square of the duration of similar steps, so that the relative error counts.
Steps are kept in cells by kind and size. Each cell forgets with its own new steps and with age.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

FEATURES = 5
# Divisors of the features.
PREFILL_TOKENS, PREFILL_PAIRS, DECODE_REQS, DECODE_KV_TOKENS = 1e3, 1e6, 10.0, 1e4
# Steps that a cell remembers, and the half-life of their weight.
CELL_STEPS = 64.0
HALF_LIFE_S = 600.0
# A step counts at most this many times the mean of its cell: the machine may have paused. A lasting
# change raises the mean.
OUTLIER_RATIO = 4.0
_TRUSTED_STEPS = 4.0
RECENT_STEPS = 64  # that are remembered one by one
_RIDGE = 1e-4  # keeps features that never varied apart from each other
_NO_SUMS = (0.0,) * (FEATURES + 1) ** 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one engine step. `decode_kv_tokens` is the total context of its decoding
    requests, `prefill_end` the longest context that a prompt reaches."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_end: int = 0
    decode_reqs: int = 0
    decode_kv_tokens: int = 0

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        return (
            1.0,
            self.prefill_tokens / PREFILL_TOKENS,
            self.prefill_pairs / PREFILL_PAIRS,
            self.decode_reqs / DECODE_REQS,
            self.decode_kv_tokens / DECODE_KV_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class Moments:
    """Weighted sums over steps. `steps`: their weight; `end`: the longest prompt, in tokens;
    `sums`: products of all pairs of features and seconds, a matrix by rows, seconds last."""

    steps: float = 0.0
    end: int = 0
    sums: tuple[float, ...] = _NO_SUMS

    @property
    def is_sound(self) -> bool:
        """False if a peer sent what cannot be sums over steps."""
        return len(self.sums) == len(_NO_SUMS) and all(
            0 <= x < math.inf for x in (self.steps, *self.sums)
        )

    def scaled(self, factor: float) -> Moments:
        """Return the same steps with another weight."""
        return Moments(self.steps * factor, self.end, tuple(x * factor for x in self.sums))


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Moments of steps with a prompt, and of steps that only decode."""

    prefill: Moments = Moments()
    decode: Moments = Moments()


def total(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all steps together."""
    found = [Moments(), *parts]
    return Moments(
        sum(x.steps for x in found),
        max(x.end for x in found),
        tuple(map(sum, zip(*(x.sums for x in found), strict=True))),
    )


def pooled(workers: Iterable[StepMoments]) -> StepMoments:
    """Return the moments of several workers together."""
    found = list(workers)
    return StepMoments(total(x.prefill for x in found), total(x.decode for x in found))


def fit_costs(moments: Moments) -> tuple[float, ...]:
    """Return the non-negative least-squares solution for the features. The most negative
    coefficient is removed until there is none."""
    import numpy as np  # slow to load, and most commands fit nothing

    sums = np.array(moments.sums).reshape(FEATURES + 1, -1)
    xx, xy = sums[:FEATURES, :FEATURES], sums[:FEATURES, FEATURES]
    found = np.zeros(FEATURES)
    active = np.flatnonzero(np.diag(xx) > 1e-12)
    while active.size:
        matrix = xx[np.ix_(active, active)]
        matrix = matrix + _RIDGE * np.diag(np.diag(matrix))
        solved = np.linalg.solve(matrix, xy[active])
        if solved.min() >= 0:
            found[active] = solved
            break
        active = np.delete(active, solved.argmin())
    return tuple(found.tolist())


class _Cell:
    """Similar steps: their moments, and the sum of their `seconds`. Each new step reduces the
    weight of the others."""

    __slots__ = ("at", "moments", "seconds")

    def __init__(self) -> None:
        self.moments = Moments()
        self.seconds = 0.0
        self.at = 0.0

    def add(self, shape: StepShape, seconds: float, now: float) -> None:
        steps = self.moments.steps
        if steps >= _TRUSTED_STEPS:
            seconds = min(seconds, OUTLIER_RATIO * self.seconds / steps)
        kept = (1.0 - 1.0 / CELL_STEPS) * self.age_factor(now)
        values = (*shape.features, seconds)
        products = tuple(x * y for x in values for y in values)
        self.moments = total((self.moments.scaled(kept), Moments(1.0, shape.prefill_end, products)))
        self.seconds = self.seconds * kept + seconds
        self.at = now

    def relative(self, now: float) -> Moments:
        """Return the moments at `now`, in units of the mean duration."""
        factor = self.age_factor(now)
        mean_s = self.seconds / self.moments.steps
        weighted = self.moments.scaled(factor / mean_s**2)
        return replace(weighted, steps=self.moments.steps * factor)

    def age_factor(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))


class Step(NamedTuple):
    """One engine step, in seconds on the clock of `StepRecorder.observe`."""

    ended_at: float
    took_s: float
    prefill_tokens: int
    decode_reqs: int


class StepRecorder:
    """Collects steps. Its methods may be called from different threads."""

    def __init__(self) -> None:
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        # One cell for each power of four of prompt tokens, or of two of decoding requests.
        self._cells: dict[tuple[bool, int], _Cell] = {}
        self._lock = threading.Lock()

    def observe(self, shape: StepShape, seconds: float, now: float) -> None:
        """Add a step of `shape` that took `seconds` and ended at `now`."""
        if seconds <= 0 or not (shape.prefill_tokens or shape.decode_reqs):
            return
        has_prompt = shape.prefill_tokens > 0
        tokens, reqs = shape.prefill_tokens.bit_length() // 2, shape.decode_reqs.bit_length()
        with self._lock:
            cell = self._cells.setdefault((has_prompt, tokens if has_prompt else reqs), _Cell())
            cell.add(shape, seconds, now)
            self._recent.append(Step(now, seconds, shape.prefill_tokens, shape.decode_reqs))

    def recent(self) -> list[Step]:
        """Return the last steps, oldest first."""
        with self._lock:
            return list(self._recent)

    def moments(self, now: float) -> StepMoments:
        """Return what is remembered at `now`, on the clock of `observe`."""
        with self._lock:
            kinds = [
                total(cell.relative(now) for (has, _), cell in self._cells.items() if has is kind)
                for kind in (True, False)
            ]
        return StepMoments(*kinds)
