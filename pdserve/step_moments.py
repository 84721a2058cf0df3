"""Costs of engine steps as sums for a least-squares fit: workers collect them, routers fit.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FEATURES = 5
# Divisors of the features.
PREFILL_TOKENS, PREFILL_PAIRS, DECODE_REQS, DECODE_KV_TOKENS = 1e3, 1e6, 10.0, 1e4
PAIRS = tuple((i, j) for i in range(FEATURES) for j in range(i, FEATURES))
# Steps that a cell remembers, and the half-life of their weight.
CELL_STEPS = 64.0
HALF_LIFE_S = 600.0
# A step counts at most this many times the mean of its cell: the machine may have paused. A lasting
# change raises the mean.
OUTLIER_RATIO = 4.0
_TRUSTED_STEPS = 4.0


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
    """Weighted sums over steps. `steps`: their weight; `end`: the longest prompt, in tokens; `xx`:
    products of features (upper triangle, by rows), in 1/s²; `xy`: features times seconds, in 1/s;
    `yy`: seconds squared, without unit."""

    steps: float = 0.0
    end: int = 0
    xx: tuple[float, ...] = (0.0,) * len(PAIRS)
    xy: tuple[float, ...] = (0.0,) * FEATURES
    yy: float = 0.0

    @property
    def is_sound(self) -> bool:
        """False if a peer sent what cannot be sums over steps."""
        return (
            len(self.xx) == len(PAIRS)
            and len(self.xy) == FEATURES
            and all(0 <= x < math.inf for x in (*self.xx, *self.xy, self.yy, self.steps))
        )


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
        tuple(map(sum, zip(*(x.xx for x in found), strict=True))),
        tuple(map(sum, zip(*(x.xy for x in found), strict=True))),
        sum(x.yy for x in found),
    )


def pooled(workers: Iterable[StepMoments]) -> StepMoments:
    """Return the moments of several workers together."""
    found = list(workers)
    return StepMoments(total(x.prefill for x in found), total(x.decode for x in found))


class _Cell:
    """Similar steps: their weight and sums. Each new step reduces the weight of the others."""

    __slots__ = ("at", "prefill_end", "sums", "weight", "y")

    def __init__(self) -> None:
        self.weight = 0.0
        self.y = 0.0
        self.at = 0.0
        self.prefill_end = 0
        self.sums = [0.0] * (len(PAIRS) + FEATURES + 1)

    def add(self, features: Sequence[float], seconds: float, end: int, now: float) -> None:
        if self.weight >= _TRUSTED_STEPS:
            seconds = min(seconds, OUTLIER_RATIO * self.y / self.weight)
        kept = (1.0 - 1.0 / CELL_STEPS) * self._age_factor(now)
        self.weight = self.weight * kept + 1.0
        self.y = self.y * kept + seconds
        self.at = now
        self.prefill_end = max(self.prefill_end, end)
        values = [features[i] * features[j] for i, j in PAIRS]
        values += [x * seconds for x in features]
        values.append(seconds * seconds)
        self.sums = [s * kept + v for s, v in zip(self.sums, values, strict=True)]

    def moments(self, now: float) -> Moments:
        factor = self._age_factor(now)
        weight = self.weight * factor
        mean_s = self.y / self.weight
        sums = [s * factor / mean_s**2 for s in self.sums]
        xx, xy = sums[: len(PAIRS)], sums[len(PAIRS) : -1]
        return Moments(weight, self.prefill_end, tuple(xx), tuple(xy), sums[-1])

    def _age_factor(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)) if self.weight else 1.0


class StepRecorder:
    """Collects steps. `observe` and `moments` may be called from different threads."""

    def __init__(self) -> None:
        # One cell for each power of four of prompt tokens, or of two of decoding requests.
        self._cells: dict[tuple[bool, int], _Cell] = {}
        self._lock = threading.Lock()

    def observe(self, shape: StepShape, seconds: float, now: float) -> None:
        """Add a step of `shape` that took `seconds` and ended at `now`."""
        if seconds <= 0 or not (shape.prefill_tokens or shape.decode_reqs):
            return
        has_prompt = shape.prefill_tokens > 0
        tokens, reqs = shape.prefill_tokens.bit_length() // 2, shape.decode_reqs.bit_length()
        size = tokens if has_prompt else reqs
        with self._lock:
            cell = self._cells.setdefault((has_prompt, size), _Cell())
            cell.add(shape.features, seconds, shape.prefill_end, now)

    def moments(self, now: float) -> StepMoments:
        """Return what is remembered at `now`, on the clock of `observe`."""
        with self._lock:
            kinds = {True: list[Moments](), False: list[Moments]()}
            for (has_prompt, _), cell in self._cells.items():
                kinds[has_prompt].append(cell.moments(now))
        return StepMoments(total(kinds[True]), total(kinds[False]))
