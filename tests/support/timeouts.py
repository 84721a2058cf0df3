"""Time in tests: limits for waits, a wait for a condition, and a way to skip a deadline."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

# Limit of each wait: enough for a busy machine that is ten times slower than a developer's. Only
# failing tests take longer because of it.
WAIT_S = 120.0
# Limit for the start of a process that loads vLLM and a model.
START_S = 600.0
# A test is considered hung after this time. It may load several such processes.
HUNG_S = 3 * START_S


async def wait_until(
    condition: Callable[[], T | Awaitable[T]], *, within_s: float = WAIT_S, pause_s: float = 0.01
) -> T:
    """Wait until `condition()`, or the awaitable that it returns, gives a true value, and return
    that. For what reports no change of itself, such as another process. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return cast("T", found)
            await asyncio.sleep(pause_s)


def skip(seconds: float) -> None:
    """Advance the clock of the running loop's timers. A test can let a deadline pass at a chosen
    point instead of racing with it."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
