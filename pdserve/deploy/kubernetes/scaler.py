"""Writes the numbers of workers on Kubernetes: those that `scaling.Scaler` decides, to `/scale`.

Kubernetes chooses the pods that go, the cheapest first. So before there are fewer pods, each gets
the number of its open streams as its cost.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.config import refuse
from pdserve.deploy.kubernetes.api import Pod, call, merge
from pdserve.deploy.scaling import Scaler
from pdserve.errors import Conflict, NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.config import ScalingConfig
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.load import Load
    from pdserve.deploy.scaling import Bounds
    from pdserve.types import Role

logger = logging.getLogger(__name__)

_TRIES = 5
_COST = "controller.kubernetes.io/pod-deletion-cost"


class Pool(NamedTuple):
    """The workers of one role: what has their number, and how many there may be."""

    scale: Any
    name: str
    bounds: Bounds


class ReplicaScaler:
    """Follows the load while it holds the lease. State: the decisions since it got the lease."""

    def __init__(
        self,
        client: Any,
        lease: LeaderLease,
        pools: Mapping[Role, Pool],
        rules: ScalingConfig,
        measure: Callable[[], Awaitable[Load]],
        clock: Callable[[], float],
    ) -> None:
        """The pods of workers have the workers' names."""
        self._client = client
        self._lease = lease
        self._pools = pools
        self._rules = rules
        self._measure = measure
        self._clock = clock
        self._scaler: Scaler | None = None

    async def look(self) -> None:
        """Renew the lease, look at the load, and write the numbers that differ.

        Raises ClientError if it lacks a right or a pool does not exist, ConfigError if the routers
        would forget the model, another PdserveError if somebody does not answer."""
        if not await self._lease.renew():
            self._scaler = None
            return
        load = await self._measure()
        if self._rules.to_zero_after_s and not load.on_demand:
            refuse(
                "router.on_demand_models", "lacks the model, which would be lost at zero workers"
            )
        scales = {role: await self._get(pool) for role, pool in self._pools.items()}
        if self._scaler is None:
            logger.info("this process leads")
            bounds = {role: pool.bounds for role, pool in self._pools.items()}
            present = {role: _replicas(scale) for role, scale in scales.items()}
            self._scaler = Scaler(bounds, self._rules, present)
        for role, wanted in self._scaler.decide(load.needs, self._clock()).items():
            if wanted != (before := _replicas(scales[role])):
                await self._set(self._pools[role], wanted, scales[role], load)
                need = load.needs.get(role, "unknown")
                logger.info("%s workers: %d instead of %d, need %s", role, wanted, before, need)

    async def _get(self, pool: Pool) -> Any:
        return await call(self._client.get(pool.scale, pool.name))

    async def _set(self, pool: Pool, wanted: int, scale: Any, load: Load) -> None:
        """Write a number of replicas over the one in `scale`, or over a later one."""
        for _ in range(_TRIES):
            if wanted < _replicas(scale):
                await self._set_costs(load)
            metadata = {"resourceVersion": scale.metadata.resourceVersion}
            change = {"metadata": metadata, "spec": {"replicas": wanted}}
            with suppress(Conflict):
                return await self._write(pool.scale, pool.name, change)
            scale = await self._get(pool)
        raise Unavailable(f"{pool.name} changed each time that its replicas were to be set")

    async def _set_costs(self, load: Load) -> None:
        async def set_cost(pod: str, streams: int) -> None:
            with suppress(NotFound):  # a worker that is not a pod here
                await self._write(Pod, pod, {"metadata": {"annotations": {_COST: str(streams)}}})

        calls = (set_cost(*item) for item in load.streams.items())
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _write(self, kind: Any, name: str, change: dict[str, Any]) -> None:
        if not self._lease.is_held:
            raise Unavailable(f"the lease ended before {name} was written")
        await merge(self._client, kind, name, change)


def _replicas(scale: Any) -> int:
    return int(scale.spec.replicas or 0)  # 0 is left out
