"""What a policy may ask beside the candidates: lookups that answer at once and change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.placement.values import Candidate, Demand


class PrefixLookup(Protocol):
    """Knows which workers hold the KV of a prompt's beginning."""

    def cached_tokens(self, demand: Demand) -> Mapping[str, int]:
        """Tokens of the prompt that are cached, by worker id; workers without any are left out."""
        ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """What placing a request so would come to. `prefill` is None where `decode` does both phases.
    `itl_harm_s` is what streams that run on the decode worker lose to it, summed over them."""

    prefill: str | None
    decode: str
    ttft_s: float
    itl_harm_s: float
    transfer_s: float = 0.0
    queue_s: float = 0.0


class CostModel(Protocol):
    """Predicts from what was measured."""

    def predict(
        self,
        demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        """None while too little was measured to say."""
        ...


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The lookups that this router has."""

    prefix: PrefixLookup | None = None
    cost: CostModel | None = None


NO_CONTEXT = PlacementContext()
