"""The service under test, and beside it the engine to which nothing happens."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.asking import TIMEOUT_S, Asker
from benchmarks.chaos.service import Service

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.chaos.settings import ChaosSettings

# Right answers come when they come.
_PATIENCE_S: Final = 600.0


class Pair:
    """Owns both from ``start`` to ``stop``. ``asker`` asks the one, ``right`` the other; ``left``
    is what they left behind, and those that were there before them."""

    def __init__(self, settings: ChaosSettings, directory: Path) -> None:
        self._directory = directory
        self._settings = settings
        self._changes = 0
        self.service = Service(settings.config(), directory / "service")
        self.reference = Service(settings.reference(), directory / "reference")
        self.left: list[str] = []
        self._stack = AsyncExitStack()
        self._right_stack = AsyncExitStack()
        self.asker: Asker
        self.right: Asker

    async def start(self) -> None:
        """Both at once. Raises :class:`BenchError`."""
        starting = [asyncio.create_task(x.start()) for x in (self.service, self.reference)]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self.asker = await self._stack.enter_async_context(_asker(self.service, TIMEOUT_S))
        self.right = await self._right_stack.enter_async_context(
            _asker(self.reference, _PATIENCE_S)
        )

    async def become(self, settings: ChaosSettings) -> None:
        """Put a service with these settings into the place of the one, unless it has them. Raises
        :class:`BenchError`."""
        if settings == self._settings:
            return
        self._settings = settings
        await self._stack.aclose()
        self.left += (await self.service.stop()).what
        self._changes += 1
        directory = self._directory / f"service-{self._changes}"
        self.service = Service(settings.config(), directory)
        await self.service.start()
        self.asker = await self._stack.enter_async_context(_asker(self.service, TIMEOUT_S))

    async def stop(self) -> None:
        """Both, whether they were ready or not, and account for what is left."""
        await self._stack.aclose()
        await self._right_stack.aclose()
        for each in (self.service, self.reference):
            self.left += (await each.stop()).what


def _asker(service: Service, timeout_s: float) -> Asker:
    return Asker(grpc=service.routers, http=service.urls, model=service.model, timeout_s=timeout_s)
