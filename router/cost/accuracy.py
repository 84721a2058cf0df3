"""How far predictions were off: predicted over actual, for each kind of prediction."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cost.outcome import Outcome
    from router.placement.context import Prediction

KINDS = ("ttft", "prefill", "transfer", "itl")
_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of predicted over actual; 1 is exact, below it took longer than was said."""

    count: int
    p10: float
    p50: float
    p90: float


def ratios(prediction: Prediction, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """Predicted over actual, for what was both predicted and seen."""
    pairs = (
        (prediction.ttft_s, outcome.ttft_s),
        (prediction.ttft_s - prediction.queue_s, outcome.prefill_s),
        (prediction.transfer_s, outcome.exposed_transfer_s),
        (prediction.itl_s, outcome.tpot_s),
    )
    for kind, (predicted, actual) in zip(KINDS, pairs, strict=True):
        if actual is not None and actual > 0:
            yield kind, predicted / actual


class Accuracy:
    """State: the latest ratios of each model and kind."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], deque[float]] = {}

    def add(self, model: str, kind: str, ratio: float) -> None:
        self._latest.setdefault((model, kind), deque(maxlen=_WINDOW)).append(ratio)

    def quantiles(self, model: str) -> dict[str, Quantiles]:
        """By kind; those that nothing was seen of are left out."""
        found = {}
        for kind in KINDS:
            latest = self._latest.get((model, kind))
            if latest:
                cuts = statistics.quantiles([*latest, *latest], n=10)
                found[kind] = Quantiles(len(latest), cuts[0], cuts[4], cuts[8])
        return found
