"""Which workers of `pdserve up` run, by the load of their model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.deploy.scaling import Bounds, Scaler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from pdserve.config import ScalingConfig
    from pdserve.deploy.load import Load
    from pdserve.local.specs import Pool


class Change(NamedTuple):
    """Workers to start or to stop, and why."""

    start: Sequence[str]
    stop: Sequence[str]
    reason: str


class LoadFollower:
    """Follows the load of one model. State: the decisions so far."""

    def __init__(
        self,
        pools: Sequence[Pool],
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
        """Return what has to change, given the names of the workers that run and of those that are
        loaded, which start first. The workers with the fewest open streams stop. Raises
        PdserveError if no router tells the load."""
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
