"""What this region can serve now, for the routers of other regions and for the choice of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.types import GENERATING, Role
from pdserve.v1 import peer_pb2 as p
from router.placement.peers import PROMPT_LENGTHS, ModelLoad, why_not
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.types import Adapter, GenerateRequest
    from router.admission import AdmissionController
    from router.fleet.peers import RegionPeers
    from router.fleet.registry import Fleet
    from router.placement.cost import CostModel

# A load is at most this old. Predicting it asks each worker, which is too slow for each request.
FRESH_S = 0.2


class RegionLoad:
    """State: the last load, and its time. `adapters`: the served LoRA adapters by name."""

    def __init__(
        self,
        fleet: Fleet,
        costs: CostModel,
        admission: AdmissionController,
        adapters: Mapping[str, Adapter],
    ) -> None:
        self._fleet, self._costs, self._admission = fleet, costs, admission
        self._adapters = adapters
        self._found: Mapping[str, ModelLoad] = {}
        self._at: float | None = None

    def models(self) -> Mapping[str, ModelLoad]:
        """Return the load of each model that generates, by name."""
        now = self._fleet.now()
        if self._at is None or now - self._at >= FRESH_S:
            names = [x for x in self._fleet.models() if self._fleet.of_model(x)]
            self._found, self._at = {x: self._load(x) for x in names}, now
        return self._found

    def _load(self, model: str) -> ModelLoad:
        fleet = self._fleet
        ready = [m for m in fleet.of_model(model, GENERATING) if m.state is MemberState.READY]
        # Without prefill workers, answers run aggregated on the others.
        computing = [m for m in ready if m.info.role is not Role.DECODE] or ready
        wait_s = self._admission.queue_wait_s(model)
        ttft_s = {x: self._costs.soonest_s(model, x) for x in PROMPT_LENGTHS}
        return ModelLoad(
            fleet.models()[model],
            len(computing),
            {x: wait_s + seconds for x, seconds in ttft_s.items() if seconds is not None},
            frozenset(x.key for x in self._adapters.values() if x.model == model),
            fleet.weights_of(model).digest,
        )

    def is_updating(self, model: str) -> bool:
        """Return True while the weights of a model change: its requests wait for the new ones."""
        return any(m.state is MemberState.UPDATING for m in self._fleet.of_model(model))


def can_leave(peers: RegionPeers, load: RegionLoad, request: GenerateRequest) -> bool:
    """Return True if another region can take a request, which then need not wait in this one."""
    if not peers.by_region or request.from_region or load.is_updating(request.model):
        return False
    own = load.models().get(request.model)
    return any(not why_not(x, request, own) for x in peers.views())


def load_to_pb(region: str, models: Mapping[str, ModelLoad], *, draining: bool) -> p.RegionLoad:
    """Return the message of a region's load."""
    found = p.RegionLoad(region=region, draining=draining)
    for load in models.values():
        found.models.add(
            info=wire.model_to_pb(load.info),
            workers=load.workers,
            ttft_s=load.ttft_s,
            adapters=sorted(load.adapters),
            weights=load.weights,
        )
    return found
