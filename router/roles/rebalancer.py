"""The task that keeps the split between prefill and decode workers fit for the load."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

from pdserve.errors import PdserveError
from router.background import Background
from router.roles.rules import other_role

if TYPE_CHECKING:
    from types import TracebackType

    from pdserve.config import RolesConfig
    from router.fleet.member import Member
    from router.fleet.role_change import RoleChanger
    from router.roles.watcher import RoleWatcher

logger = logging.getLogger(__name__)


class Rebalancer:
    """Owns the task, which looks and flips; every wait in it is an interval or a flip, whose steps
    have deadlines. An async context manager: leaving ends the task, and a flip that is under way is
    taken back."""

    def __init__(self, watcher: RoleWatcher, flips: RoleChanger, config: RolesConfig) -> None:
        self._watcher = watcher
        self._flips = flips
        self._config = config
        self._looking = Background("role-rebalancer", self._run)

    async def __aenter__(self) -> Self:
        await self._looking.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._looking.__aexit__(kind, error, trace)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.interval_s)
            for model in self._watcher.models():
                member = self._watcher.look(model)
                if member is not None:
                    self._watcher.ended(model, member.worker_id, await self._flip(member))

    async def _flip(self, member: Member) -> str:
        """Why it did not come to be, where it did not."""
        role = other_role(member.info.role)
        drain_s = self._config.drain_timeout_s
        try:
            done = await self._flips.change(member.worker_id, role, drain_timeout_s=drain_s)
        except PdserveError as error:
            failure = error.message
        else:
            failure = done.failure
        if failure:
            logger.warning("worker %s is no %s worker: %s", member.worker_id, role, failure)
        return failure
