"""Writes the numbers of workers on Kubernetes: those that `scaling.Scaler` decides, to `/scale`.

Pods that go are chosen by Kubernetes, the cheapest first. So before there are fewer pods, each gets
the number of its open streams as its cost.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.deploy.kubernetes.api import Pod
from pdserve.deploy.scaling import Scaler
from pdserve.errors import ClientError, Conflict, NotFound, PdserveError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.deploy.kubernetes.api import Kubernetes, Target
    from pdserve.deploy.kubernetes.lease import LeaderLease
    from pdserve.deploy.load import Load
    from pdserve.deploy.scaling import Bounds, ScalingRules
    from pdserve.types import Role

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_TRIES = 5
_COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one role, and how many there may be."""

    target: Target
    bounds: Bounds


class ReplicaScaler:
    """Follows the load while it holds the lease. State: the decisions since it got the lease."""

    def __init__(
        self,
        api: Kubernetes,
        lease: LeaderLease,
        pools: Mapping[Role, Pool],
        rules: ScalingRules,
        measure: Callable[[], Awaitable[Load]],
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._lease = lease
        self._pools = pools
        self._rules = rules
        self._measure = measure
        self._clock = clock
        self._scaler: Scaler | None = None

    async def run(self) -> None:
        """Scale until cancelled. Raises ClientError if it lacks a right or a pool does not exist;
        waits while nobody answers."""
        failure = ""
        try:
            while True:
                before, failure = failure, ""
                try:
                    await self.look()
                except PdserveError as error:
                    if isinstance(error, ClientError) and not isinstance(error, Conflict):
                        raise
                    failure = error.message
                if failure != before:
                    logger.warning("%s", failure or "works again")
                await asyncio.sleep(_LOOK_S)
        finally:
            await self._lease.release()

    async def look(self) -> None:
        """Renew the lease, look at the load, and write the numbers that differ."""
        was_leader = self._scaler is not None
        if not await self._lease.renew():
            self._scaler = None
            if was_leader:
                logger.warning("another process leads")
            return
        scales = {role: await self._scale(role) for role in self._pools}
        if self._scaler is None:
            logger.info("leads")
            bounds = {role: pool.bounds for role, pool in self._pools.items()}
            present = {role: _replicas(scale) for role, scale in scales.items()}
            self._scaler = Scaler(bounds, self._rules, present)
        load = await self._measure()
        for role, wanted in self._scaler.decide(load.needs, self._clock()).items():
            if wanted != (present_now := _replicas(scales[role])):
                await self._set(role, wanted, scales[role], load)
                need = f"{load.needs[role]:.2f}" if role in load.needs else "unknown"
                logger.info(
                    "%s workers: %d instead of %d (need %s)", role, wanted, present_now, need
                )

    async def _scale(self, role: Role) -> Any:
        target = self._pools[role].target
        return await self._api.get(target.scale, target.name)

    async def _set(self, role: Role, wanted: int, scale: Any, load: Load) -> None:
        """Write a number of replicas over the one in `scale`, or over a later one."""
        target = self._pools[role].target
        for _ in range(_TRIES):
            if wanted < _replicas(scale):
                await self._set_costs(load)
            change = {
                "metadata": {"resourceVersion": scale.metadata.resourceVersion},
                "spec": {"replicas": wanted},
            }
            with suppress(Conflict):
                return await self._write(target.scale, target.name, change)
            scale = await self._scale(role)
        raise Unavailable(f"{target.name} changed each time that its replicas were to be set")

    async def _set_costs(self, load: Load) -> None:
        calls = (self._set_cost(*item) for item in load.streams.items())
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _set_cost(self, pod: str, streams: int) -> None:
        with suppress(NotFound):  # a worker that is not a pod here
            await self._write(Pod, pod, {"metadata": {"annotations": {_COST: str(streams)}}})

    async def _write(self, kind: Any, name: str, change: dict[str, Any]) -> None:
        if not self._lease.is_held:
            raise Unavailable(f"the lease ended before {name} was written")
        await self._api.patch(kind, name, change)


def _replicas(scale: Any) -> int:
    return int(scale.spec.replicas or 0)  # 0 is left out
