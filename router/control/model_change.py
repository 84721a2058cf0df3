"""Changes that are made on all workers of a model, such as loading an adapter."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Iterable

T = TypeVar("T")


class ModelChanges:
    """Runs changes. State: their tasks, and those that callers can join, by key."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._joinable: dict[Hashable, asyncio.Task[Any]] = {}

    async def run(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if the caller is cancelled: a client that leaves must not
        leave some workers changed and others not."""
        return await asyncio.shield(self._begin(change))

    async def join(self, key: Hashable, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `change`, or await the one with this key that is running. Return its result."""
        task: asyncio.Task[T] | None = self._joinable.get(key)
        if task is None:
            task = self._joinable[key] = self._begin(change())
            task.add_done_callback(lambda _: self._joinable.pop(key))
        return await asyncio.shield(task)

    def _begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
