"""A task that runs as long as the router."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)


@asynccontextmanager
async def background(
    name: str, work: Callable[[], Awaitable[None]], *, restart_s: float = 1.0
) -> AsyncIterator[None]:
    """Run `work` in a task until the context is left. If it raises, log that and start it again."""

    async def run() -> None:
        while True:
            try:
                await work()
            except Exception:
                logger.exception("%s failed and is restarted", name)
            await asyncio.sleep(restart_s)

    task = asyncio.create_task(run(), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
