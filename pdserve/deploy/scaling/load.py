"""The load of a service, measured from its routers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import wire
from pdserve.errors import PdserveError, Unavailable
from pdserve.net.rpc import error_from_rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.net.discovery import Discovery
    from pdserve.net.rpc import Dialer
    from pdserve.types import Role

_ANSWER_S = 3.0
_AWAY = ("lost", "left", "crash-looping")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a model. `needs`: number of workers that the load of each role keeps busy.
    `streams`: open streams by worker. `ready`: workers, of any model, that are ready at every
    router. `on_demand`: every router has the model in `router.on_demand_models`, so that requests
    wait while it has no worker. `on_demand_somewhere`: at least one router does."""

    needs: Mapping[Role, float]
    streams: Mapping[str, int]
    ready: frozenset[str] = frozenset()
    on_demand: bool = False
    on_demand_somewhere: bool = False


class RouterLoads:
    """Measures the load of one model at every router that `discovery` finds."""

    def __init__(self, discovery: Discovery, dialer: Dialer, model: str) -> None:
        self._discovery = discovery
        self._dialer = dialer
        self._model = model

    async def measure(self) -> Load:
        """Return the maximum over routers, because each router knows all workers, but only its own
        queued requests. Raises PdserveError if no router answers."""
        addresses = await self._discovery.addresses()
        answers = await asyncio.gather(*map(self._ask, addresses))
        loads = [x for x in answers if isinstance(x, Load)]
        if not loads:
            failures = [x for x in answers if isinstance(x, PdserveError)]
            raise next(iter(failures), Unavailable("no router is listed"))
        needs: dict[Role, float] = {}
        streams: dict[str, int] = {}
        for load in loads:
            for role, need in load.needs.items():
                needs[role] = max(need, needs.get(role, 0.0))
            for name, count in load.streams.items():
                streams[name] = max(count, streams.get(name, 0))
        everywhere = frozenset.intersection(*(load.ready for load in loads))
        # A router that did not answer may not know a worker, so none is ready at every router.
        ready = everywhere if len(loads) == len(answers) else frozenset()
        on_demand = [load.on_demand for load in loads]
        return Load(needs, streams, ready, all(on_demand), any(on_demand))

    async def _ask(self, address: str) -> Load | PdserveError:
        async with self._dialer.open_channel(address) as channel:
            try:
                found = await RegistryStub(channel).ListWorkers(
                    w.ListWorkersRequest(), timeout=_ANSWER_S, metadata=self._dialer.metadata
                )
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                return type(failure)(f"router at {address}: {failure.message}")
        ours = [x for x in found.workers if x.info.model.name == self._model]
        return Load(
            {wire.role_from_pb(x.role): x.workers for x in found.needs if x.model == self._model},
            {x.info.worker_id: _streams(x) for x in ours if x.state not in _AWAY},
            frozenset(x.info.worker_id for x in found.workers if x.state == "ready"),
            any(x.model == self._model for x in found.on_demand),
        )


def _streams(entry: w.WorkerEntry) -> int:
    """Return the open streams of a worker, as it reports or, before its first report, as this
    router counts."""
    if entry.HasField("load"):
        return entry.load.num_running_reqs + entry.load.num_waiting_reqs
    return entry.outstanding_requests
