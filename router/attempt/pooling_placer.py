"""Workers for embeddings: each prompt is one request to a pooling worker of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest
from router.attempt.placer import Reservation, Room
from router.attempt.recovery import RetryStep
from router.fleet.pooling_choice import pick_pooling_worker
from router.placement.values import Demand

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.attempt.recovery import Constraints
    from router.fleet.registry import Fleet

# Attempts of one embedding, each on another worker if there is one.
ATTEMPTS = 3
POOLING_STEPS = (RetryStep.POOLING,)


class PoolingPlacer:
    """Places embeddings. No placement policy: they have one phase and transfer no KV."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check(self, model: str) -> None:
        """Raise InvalidRequest if no worker computes embeddings of `model`."""
        if not self._fleet.pooling(model):
            text = f"model {model} has no pooling workers: it generates text, and no embeddings"
            raise InvalidRequest(text, field="model")

    def demand(self, request: GenerateRequest, _: frozenset[str]) -> Demand:
        tokens = len(request.prompt_token_ids)
        return Demand(
            request.model, tokens, 0, request_id=request.request_id, regions=request.regions
        )

    def reserve(self, demand: Demand) -> Reservation:
        """Reserve a worker. Raises Unavailable."""
        worker = pick_pooling_worker(self._fleet, demand)
        return Reservation(worker, room=Room(demand.prompt_tokens))

    def reserve_again(self, demand: Demand, constraints: Constraints, *, cause: str) -> Reservation:
        """Reserve a worker after a failure. Raises Unavailable."""
        worker = pick_pooling_worker(
            self._fleet, demand, without=constraints.without, avoid=constraints.avoid
        )
        return Reservation(worker, room=Room(demand.prompt_tokens))
