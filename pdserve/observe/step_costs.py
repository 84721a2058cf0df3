"""Costs of engine steps as sums for a least-squares fit. Workers collect the sums; workers and
routers fit them.

A step is described by five features, each scaled to be near 1, and by its duration:

    1 · prefill tokens / 1e3 · attended pairs / 1e6 · decoding requests / 10 · their context / 1e4

A chunk of m prompt tokens after p others attends to m·(p + m/2) pairs. The sums (moments) have a
fixed size and add up over workers, so a router that has just started can fit at once. The weight of
a step is the inverse square of the duration of similar steps, so the fit minimises the relative
error. Steps are kept in cells by kind and size. Weights in a cell decay with its new steps and with
age.
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
# Most steps that a cell weighs, and the half-life of their weight.
CELL_STEPS = 64.0
HALF_LIFE_S = 600.0
# A step's duration is capped at this multiple of its cell's mean, because the machine may have
# paused. A lasting change still raises the mean.
OUTLIER_RATIO = 4.0
_TRUSTED_STEPS = 4.0  # weight of steps from which a cell's mean is reliable enough for the cap
RECENT_STEPS = 64  # number of steps kept individually
_RIDGE = 1e-4  # makes the fit solvable if some features never varied
_NO_SUMS = (0.0,) * (FEATURES + 1) ** 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one engine step. `decode_kv_tokens`: total context of the decoding requests.
    `prefill_end`: longest context of a prompt after this step."""

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
    """Weighted sums over steps. `steps`: total weight. `end`: longest prompt, in tokens. `sums`:
    products of all pairs of features and seconds, as a row-major matrix with seconds last."""

    steps: float = 0.0
    end: int = 0
    sums: tuple[float, ...] = _NO_SUMS

    @property
    def is_sound(self) -> bool:
        """False if these values, sent by a peer, cannot be sums over steps."""
        return len(self.sums) == len(_NO_SUMS) and all(
            0 <= x < math.inf for x in (self.steps, *self.sums)
        )

    def scaled(self, factor: float) -> Moments:
        """Return the moments of the same steps with their weights multiplied by `factor`."""
        return Moments(self.steps * factor, self.end, tuple(x * factor for x in self.sums))


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Moments of steps with a prompt, and of steps that only decode."""

    prefill: Moments = Moments()
    decode: Moments = Moments()


def total(parts: Iterable[Moments]) -> Moments:
    """Return the sum of `parts`."""
    found = [Moments(), *parts]
    return Moments(
        sum(x.steps for x in found),
        max(x.end for x in found),
        tuple(map(sum, zip(*(x.sums for x in found), strict=True))),
    )


def pooled(workers: Iterable[StepMoments]) -> StepMoments:
    """Return the sum of the moments of several workers."""
    found = list(workers)
    return StepMoments(total(x.prefill for x in found), total(x.decode for x in found))


def fit_costs(moments: Moments) -> tuple[float, ...]:
    """Return the coefficients of a non-negative least-squares fit, in seconds per scaled feature.
    While a coefficient is negative, the most negative one is set to 0 and the rest fitted again."""
    import numpy as np  # slow to import, and most commands do not fit

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
    """Moments of similar steps, and the weighted sum of their `seconds`. Each new step reduces the
    weight of earlier ones."""

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
        """Return the moments at `now`, weighted by the inverse square of the mean duration."""
        factor = self.age_factor(now)
        mean_s = self.seconds / self.moments.steps
        weighted = self.moments.scaled(factor / mean_s**2)
        return replace(weighted, steps=self.moments.steps * factor)

    def age_factor(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S))


class Step(NamedTuple):
    """One engine step. Times are in seconds on the clock of `StepRecorder.observe`."""

    ended_at: float
    took_s: float
    prefill_tokens: int
    decode_reqs: int


class StepRecorder:
    """Collects engine steps. Thread-safe."""

    def __init__(self) -> None:
        self._recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        # By (has a prompt, size). Sizes are powers of 4 of prompt tokens for steps with a prompt,
        # and powers of 2 of decoding requests for others.
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
        """Return the moments at `now`, on the clock of `observe`."""
        with self._lock:
            kinds = [
                total(cell.relative(now) for (has, _), cell in self._cells.items() if has is kind)
                for kind in (True, False)
            ]
        return StepMoments(*kinds)
