"""Scaling of the workers of `pdserve up` by the load of their model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.deploy.scaling.scaler import Bounds, Scaler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from pdserve.config import ScalingConfig
    from pdserve.deploy.local.specs import PoolSpec
    from pdserve.deploy.scaling.load import Load


class Change(NamedTuple):
    """Workers to start and to stop, and the reason."""

    start: Sequence[str]
    stop: Sequence[str]
    reason: str


class LoadFollower:
    """Decides which workers of one model run. State: the decisions so far."""

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        rules: ScalingConfig,
        measure: Callable[[], Awaitable[Load]],
    ) -> None:
        self._pools = {pool.role: pool for pool in pools}
        bounds = {pool.role: Bounds(pool.least, len(pool.names)) for pool in pools}
        self._scaler = Scaler(bounds, rules, {pool.role: pool.least for pool in pools})
        self._measure = measure

    async def look(
        self, running: Collection[str], warm: Collection[str], now: float
    ) -> list[Change]:
        """Return the changes to make. `running`: names of running workers. `warm`: names of loaded
        spare workers, which are started first. The workers with the fewest open streams are stopped
        first. Raises PdserveError if no router reports the load."""
        load, changes = await self._measure(), []
        for role, wanted in self._scaler.decide(load.needs, now).items():
            names = self._pools[role].names
            there = [name for name in names if name in running]
            spare = sorted((x for x in names if x not in running), key=lambda x: x not in warm)
            idlest = sorted(there, key=lambda name: load.streams.get(name, 0))
            if wanted != len(there):
                need = f"{load.needs[role]:.1f}" if role in load.needs else "unknown"
                reason = f"{wanted} {role} workers instead of {len(there)}: the load needs {need}"
                start, stop = spare[: max(0, wanted - len(there))], idlest[: len(there) - wanted]
                changes.append(Change(start, stop if wanted < len(there) else (), reason))
        return changes
