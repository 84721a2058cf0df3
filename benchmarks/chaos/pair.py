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
    is what they left behind, once stopped."""

    def __init__(self, settings: ChaosSettings, directory: Path) -> None:
        self.service = Service(settings.config(), directory / "service")
        self.reference = Service(settings.reference(), directory / "reference")
        self.left: list[str] = []
        self._stack = AsyncExitStack()
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
        waits = {self.service: TIMEOUT_S, self.reference: _PATIENCE_S}
        self.asker, self.right = [
            await self._stack.enter_async_context(
                Asker(grpc=x.grpc, http=x.http, model=x.model, timeout_s=wait_s)
            )
            for x, wait_s in waits.items()
        ]

    async def stop(self) -> None:
        """Both, whether they were ready or not, and account for what is left."""
        await self._stack.aclose()
        for each in (self.service, self.reference):
            self.left += (await each.stop()).what
