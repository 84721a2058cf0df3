"""Owns one task of the router's own that should run as long as the router does."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

logger = logging.getLogger(__name__)

RESTART_S = 1.0


class Background:
    """Runs `work` in a task; what leaves it ends it. A `work` that ends or raises is logged and
    begun anew, so that no part of the router goes missing in silence. State: the task."""

    def __init__(
        self, name: str, work: Callable[[], Awaitable[None]], *, restart_s: float = RESTART_S
    ) -> None:
        self._name = name
        self._work = work
        self._restart_s = restart_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=self._name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:
                logger.exception("%s broke off and is begun anew", self._name)
            else:
                logger.error("%s ended, which it should not, and is begun anew", self._name)
            await asyncio.sleep(self._restart_s)
