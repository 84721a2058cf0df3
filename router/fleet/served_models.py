"""The models and adapters that this router serves, and which of them a request names."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, ModelNotFound, Unavailable
from router.fleet.pooling_choice import pick_pooling_worker
from router.placement.filters import check_servable
from router.placement.values import Demand, MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.types import Adapter, ModelInfo
    from router.fleet.on_demand import OnDemandModels
    from router.fleet.peers import RegionPeers
    from router.fleet.registry import Fleet

# States from which a worker does not return by itself.
_NOT_EXPECTED = (MemberState.DRAINING, MemberState.LOST, MemberState.LEFT)


class ServedModels:
    """Read-only view. `adapters`: the served LoRA adapters by name, kept by their owner."""

    def __init__(
        self,
        fleet: Fleet,
        adapters: Mapping[str, Adapter],
        on_demand: OnDemandModels | None,
        peers: RegionPeers,
    ) -> None:
        self._fleet, self._adapters, self._on_demand = fleet, adapters, on_demand
        self._peers = peers

    def models(self) -> Mapping[str, ModelInfo]:
        """The models that requests may name, by name: those of this region and of other ones."""
        if not self._peers.by_region:
            return self._own()
        return {**self._peers.models(), **self._own()}

    def _own(self) -> Mapping[str, ModelInfo]:
        """The models of the registered workers, and on-demand models without workers."""
        models, on_demand = self._fleet.models(), self._on_demand
        return models if on_demand is None else on_demand.with_missing(models)

    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that are served, by name."""
        return self._adapters

    def check_ready(self) -> None:
        """Raise Unavailable unless every model can be served now or started on demand, or another
        region takes requests. A model whose workers are all drained or gone counts only if no other
        can be served."""
        if not self._peers.models():
            self._check_own()

    def _check_own(self) -> None:
        models, fleet, on_demand = self._own(), self._fleet, self._on_demand
        if not models and on_demand is None:
            raise Unavailable("no worker is registered")
        given_up: Unavailable | None = None
        serves = not models
        for name in models:
            try:
                # A router that is not ready gets no requests, which would start the model.
                if on_demand is not None and on_demand.is_missing(name):
                    pass
                elif any(m.reported.updating and not m.lost for m in fleet.of_model(name)):
                    pass  # while its weights change, requests wait in the queue
                elif fleet.of_model(name) or not fleet.pooling(name):
                    check_servable(fleet.candidates(name), name, aggregated=True)
                else:
                    pick_pooling_worker(fleet, Demand(name, 0, 0))
                serves = True
            except Unavailable as error:
                members = (*fleet.of_model(name), *fleet.pooling(name))
                if not all(x.state in _NOT_EXPECTED for x in members):
                    raise
                given_up = copy(error)  # its traceback refers to this frame
        if given_up is not None and not serves:
            raise given_up


class ModelFinder:
    """Finds models among those that `models` returns, and their LoRA adapters among those of
    `adapters`. `on_demand`: the models that start when they are asked for, None if there are
    none."""

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelInfo]],
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        on_demand: OnDemandModels | None = None,
    ) -> None:
        self.models, self._adapters, self._on_demand = models, adapters, on_demand

    def find(self, name: str) -> tuple[ModelInfo, Adapter | None]:
        """Return the model with this name, or the adapter with its model. Raises ModelNotFound,
        InvalidRequest without a name if several are served, and Unavailable without workers."""
        models = self.models()
        if not models:
            raise Unavailable("no worker is registered", retry_after_s=1.0)
        if (found := _by_name(models, name)) is not None:
            return found, None
        adapters = self._adapters()
        if (adapter := adapters.get(name)) is not None and adapter.model in models:
            return models[adapter.model], adapter
        if not name and len(models) == 1:
            return next(iter(models.values())), None
        names = [x for model in models.values() for x in model.names]
        served = ", ".join(sorted((*names, *adapters)))
        if not name:
            raise InvalidRequest(f"'model' is required; served: {served}", field="model")
        raise ModelNotFound(f"model {name!r} is not served; served: {served}", field="model")

    def is_served(self, name: str) -> bool:
        """Return True if a model or adapter with this name is served and has workers."""
        models, adapter = self.models(), self._adapters().get(name)
        found = _by_name(models, name if adapter is None else adapter.model)
        return found is not None and not (
            self._on_demand is not None and self._on_demand.is_missing(found.name)
        )

    async def find_when_ready(self, name: str, timeout_s: float) -> ModelInfo:
        """Return the model with this name, or of this adapter, once it has workers. Raises as
        `find`, and Unavailable after `timeout_s`."""
        if self._on_demand is not None:
            await self._on_demand.wait_for(name, timeout_s)
        return self.find(name)[0]


def _by_name(models: Mapping[str, ModelInfo], name: str) -> ModelInfo | None:
    """Return the model with this name or alias. `models` are keyed by first name."""
    if name in models:
        return models[name]
    return next((model for model in models.values() if name in model.aliases), None)
