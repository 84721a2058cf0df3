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


@dataclass(slots=True)
class Prediction:
    """What placing a request so would come to. `prefill` is None where `decode` does both phases.

    `ttft_s` is from placement to the first token, `queue_s` its part behind other prompts. `itl_s`
    is the gap between tokens that the decode worker's streams see now; `itl_harm_s` what they lose
    to this prompt, summed over them. `transfer_s` is what decode waits for KV after prefill.
    `cost_s` is all of it in one figure (router/cost/objective.py), and `is_habit` says that the
    last request of this size went this way."""

    prefill: str | None
    decode: str
    ttft_s: float
    itl_harm_s: float
    transfer_s: float = 0.0
    queue_s: float = 0.0
    itl_s: float = 0.0
    cost_s: float = 0.0
    is_habit: bool = False


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
