"""On-demand models: a request for one without workers waits until a worker has started.

The scaler (`pdserve/deploy/scaling/scaler.py`) starts and stops workers by load. A model with
recent requests reports some load here, so that its workers are started or kept.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Unavailable
from router.placement.filters import check_servable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pdserve.config import QueueConfig
    from pdserve.types import Adapter, ModelInfo
    from router.fleet.registry import Fleet

# Seconds that a request counts as load. ASKED_S is longer than the scaler's period. STARTING_S is
# for a model without workers: as long as a start may take.
ASKED_S, STARTING_S = 10.0, 900.0
# Load of a recent request, in workers: enough to start one, too little to affect a mean.
ASKED_LOAD = 0.01
# Assumed duration of a start until one was measured.
START_S = 60.0
# Retry-After if a start takes longer than the last one.
OVERDUE_S = 5.0


class OnDemandModels:
    """State by model: time of the last request; time since which requests wait; duration of the
    last start; description by its last workers; whether it was ever served."""

    def __init__(
        self,
        names: Collection[str],
        fleet: Fleet,
        adapters: Mapping[str, Adapter],
        queue: QueueConfig,
    ) -> None:
        """`adapters`: the served LoRA adapters by name. `queue`: limits of the wait of a request,
        and of the requests that wait."""
        self.names = frozenset(names)
        self._fleet, self._adapters = fleet, adapters
        self._queue = queue
        self._waiting = 0
        self._asked_at: dict[str, float] = {}
        self._missed_since: dict[str, float] = {}
        self._start_s: dict[str, float] = {}
        self._infos: dict[str, ModelInfo] = {}
        self._served: set[str] = set()

    def with_missing(self, models: Mapping[str, ModelInfo]) -> Mapping[str, ModelInfo]:
        """Return `models` and the on-demand models that had workers before."""
        self._infos |= {name: info for name, info in models.items() if name in self.names}
        return {**self._infos, **models}

    def is_missing(self, model: str) -> bool:
        return model in self.names and not self._is_servable(model)

    async def wait_for(self, name: str, timeout_s: float) -> None:
        """Wait until the model of a request has a worker.

        `name` is the name of a model or LoRA adapter, or "" for the only model. Returns at once for
        a name that is not an on-demand model. Raises Overloaded if too many requests wait, and
        Unavailable after `timeout_s`.
        """
        served = {*self.names, *self._fleet.models()}
        if not name and len(served) == 1:
            (name,) = served
        infos, adapter = self._infos.values(), self._adapters.get(name)
        name = name if adapter is None else adapter.model
        model = next((x.name for x in infos if name in x.names), name)
        if model not in self.names:
            return
        now = self._fleet.now()
        self._asked_at[model] = now
        if self._is_servable(model):
            self._missed_since.pop(model, None)
            return
        since = self._missed_since.setdefault(model, now)
        if self._waiting >= self._queue.max_queued_requests:
            raise Overloaded(
                f"{self._waiting} requests wait for the start of a worker",
                retry_after_s=self._retry_after_s(model, since),
            )
        give_up_at = now + min(timeout_s, self._queue.timeout_s)
        self._waiting += 1
        try:
            while not self._is_servable(model):
                if not await self._fleet.capacity_change(until=give_up_at):
                    raise Unavailable(
                        f"model {model} had no worker; one starts since "
                        f"{self._fleet.now() - since:.0f} s",
                        retry_after_s=self._retry_after_s(model, since),
                    )
        finally:
            self._waiting -= 1
        # Only the first request that resumes records the duration of the start.
        if self._missed_since.pop(model, None) is not None:
            self._start_s[model] = self._fleet.now() - since

    def loads(self) -> Iterator[tuple[str, float | None]]:
        """Yield each model with the load of its recent requests, in workers.

        The load is None for a model without requests that was never served: its first workers may
        still be loading, and a load of 0 would make the scaler stop them.
        """
        # Remember the models now: the scaler that reads the loads may stop their workers.
        self.with_missing(self._fleet.models())
        now = self._fleet.now()
        for model in sorted(self.names):
            counts_s = STARTING_S if self.is_missing(model) else ASKED_S
            if self._is_servable(model):
                self._served.add(model)
            if now - self._asked_at.get(model, -math.inf) < counts_s:
                yield model, ASKED_LOAD
            else:
                yield model, 0.0 if model in self._served else None

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield each model with a sentence on whether it has workers."""
        return ((model, self._text(model)) for model in sorted(self.names))

    def _text(self, model: str) -> str:
        if self._is_servable(model):
            return "has workers"
        start_s, since = self._start_s.get(model), self._missed_since.get(model)
        takes = "" if start_s is None else f"; a start takes {start_s:.0f} s"
        if since is None:
            return f"no worker until it is asked for{takes}"
        return f"no worker, asked for {self._fleet.now() - since:.0f} s ago{takes}"

    def _is_servable(self, model: str) -> bool:
        try:
            check_servable(self._fleet.candidates(model), model, aggregated=True)
        except Unavailable:
            return False
        return True

    def _retry_after_s(self, model: str, since: float) -> float:
        left_s = self._start_s.get(model, START_S) - (self._fleet.now() - since)
        return float(math.ceil(left_s)) if left_s > 0 else OVERDUE_S
