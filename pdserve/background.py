"""A background task that is restarted after an error."""

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
    """Run `work` in a task until the context exits. `work` runs again `restart_s` after it returns
    or raises; an error is logged."""

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
