"""Changes that are made on all workers of a model, such as loading an adapter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

T = TypeVar("T")


class ModelChanges:
    """Runs changes. State: their tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if the caller is cancelled: a client that leaves must not
        leave some workers changed and others not."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all changes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def errors_of(calls: Iterable[Coroutine[Any, Any, object]]) -> list[BaseException]:
    """Await all calls, one for each worker, and return the errors of those that failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [x for x in results if isinstance(x, BaseException)]


async def succeed(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Await all calls, then raise the first error."""
    if errors := await errors_of(calls):
        raise errors[0]
