"""Scaler of worker pools on Kubernetes. It writes the decisions of `scaling.Scaler` to `/scale`.

When Kubernetes scales down, it deletes the pods with the lowest deletion cost first. So before a
scale-down, each pod's cost is set to its number of open streams.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.config import refuse
from pdserve.deploy.kubernetes.api import Pod, call, merge
from pdserve.deploy.scaling.scaler import Scaler
from pdserve.errors import Conflict, NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.config import ScalingConfig
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.scaling.load import Load
    from pdserve.deploy.scaling.scaler import Bounds
    from pdserve.types import Role

logger = logging.getLogger(__name__)

_TRIES = 5
_COST = "controller.kubernetes.io/pod-deletion-cost"


class ScalablePool(NamedTuple):
    """The workers of one role: the `/scale` resource class, its object's name, and the bounds."""

    scale: Any
    name: str
    bounds: Bounds


class ReplicaScaler:
    """Scales the pools by load while it holds the lease. State: the decisions since it acquired the
    lease."""

    def __init__(
        self,
        client: Any,
        lease: LeaderLease,
        pools: Mapping[Role, ScalablePool],
        rules: ScalingConfig,
        measure: Callable[[], Awaitable[Load]],
        clock: Callable[[], float],
    ) -> None:
        """`measure` returns the load by worker name. A worker's pod must have the worker's name."""
        self._client = client
        self._lease = lease
        self._pools = pools
        self._rules = rules
        self._measure = measure
        self._clock = clock
        self._scaler: Scaler | None = None

    async def look(self) -> None:
        """Renew the lease, measure the load, and write the replica counts that differ.

        Raises ClientError if a permission or a pool is missing. With scale-to-zero, raises
        ConfigError if no router has the model in `router.on_demand_models`, because routers would
        forget it. Raises another PdserveError if only some routers have it, or on no answer."""
        if not await self._lease.renew():
            self._scaler = None
            return
        load = await self._measure()
        if self._rules.to_zero_after_s and not load.on_demand:
            if load.on_demand_somewhere:  # a rolling update of the routers may be in progress
                raise Unavailable("waiting: router.on_demand_models of a router lacks the model")
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

    async def _get(self, pool: ScalablePool) -> Any:
        return await call(self._client.get(pool.scale, pool.name))

    async def _set(self, pool: ScalablePool, wanted: int, scale: Any, load: Load) -> None:
        """Write a replica count. If `scale` is out of date, read it again and retry. Raises
        Unavailable after _TRIES conflicts."""
        for _ in range(_TRIES):
            if wanted < _replicas(scale):
                await self._set_costs(load)
            metadata = {"resourceVersion": scale.metadata.resourceVersion}
            change = {"metadata": metadata, "spec": {"replicas": wanted}}
            with suppress(Conflict):
                return await self._write(pool.scale, pool.name, change)
            scale = await self._get(pool)
        raise Unavailable(f"{pool.name} changed during each of {_TRIES} attempts to scale it")

    async def _set_costs(self, load: Load) -> None:
        async def set_cost(pod: str, streams: int) -> None:
            with suppress(NotFound):  # the worker is not a pod of this namespace
                await self._write(Pod, pod, {"metadata": {"annotations": {_COST: str(streams)}}})

        calls = (set_cost(*item) for item in load.streams.items())
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _write(self, kind: Any, name: str, change: dict[str, Any]) -> None:
        if not self._lease.is_held:
            raise Unavailable(f"the lease expired before {name} was written")
        await merge(self._client, kind, name, change)


def _replicas(scale: Any) -> int:
    return int(scale.spec.replicas or 0)  # Kubernetes omits a 0
