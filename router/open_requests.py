"""The requests that both faces have open, so that a stop can wait for them and then cut them."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from pdserve import deadline
from pdserve.errors import Conflict, DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from pdserve.errors import PdserveError

# How long a request that was cut may take to tell its client, and one that is late to end itself.
CUT_S = 1.0
_UNNAMED = nullcontext()


class Interruption:
    """Lets others end what the current task does inside it, with an error of their choice.

    Works as asyncio.timeout does: the task is cancelled, and the cancellation is turned into the
    error on the way out. The first interruption counts. `on_enter` and `on_exit` hear of it.
    """

    def __init__(
        self,
        on_enter: Callable[[Interruption], None] = lambda _: None,
        on_exit: Callable[[Interruption], None] = lambda _: None,
    ) -> None:
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._error: PdserveError | None = None

    def interrupt(self, error: PdserveError) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def at(self, until: float | None) -> asyncio.TimerHandle | None:
        """End what a generator's own `until` (a deadline) cannot: a write to a client that does not
        read. Whoever asks cancels the timer."""
        left = deadline.remaining(until)
        if left is None:
            return None
        return asyncio.get_running_loop().call_later(left + CUT_S, self._too_late)

    def _too_late(self) -> None:
        self.interrupt(DeadlineExceeded("the answer was not taken before the request's deadline"))

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._on_enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        self._on_exit(self)
        if self._error is None:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._error from None


class OpenRequests:
    """State: the requests that are open, those of them to which their clients gave names, and
    whether a stop has begun."""

    def __init__(self) -> None:
        self._open: set[Interruption] = set()
        self._named: dict[tuple[str, str], Interruption] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def check_open(self) -> None:
        """Raises Unavailable once a stop has begun."""
        if self._draining:
            raise _stopping()

    def enter(self) -> Interruption:
        """Counts the request that runs inside. Raises Unavailable once a stop has begun, whether
        the request has begun or not, and whatever error it is interrupted with."""
        self.check_open()
        return Interruption(self._came, self._went)

    def _came(self, interruption: Interruption) -> None:
        self._open.add(interruption)
        self._idle.clear()

    def _went(self, interruption: Interruption) -> None:
        self._open.discard(interruption)
        if not self._open:
            self._idle.set()

    def named(
        self, tenant: str, name: str, interruption: Interruption, *, resumes: bool
    ) -> AbstractContextManager[None]:
        """What runs inside is the tenant's one request of that name; nothing where it has none. One
        that resumes ends another; any other raises Conflict."""
        if not name:
            return _UNNAMED
        return self._named_so((tenant, name), interruption, resumes=resumes)

    @contextmanager
    def _named_so(
        self, key: tuple[str, str], interruption: Interruption, *, resumes: bool
    ) -> Iterator[None]:
        _, name = key
        other = self._named.get(key)
        if other is not None and not resumes:
            raise Conflict(f"request {name} is being answered", retry_after_s=1.0)
        if other is not None:
            other.interrupt(Conflict(f"request {name} goes on over another connection"))
        self._named[key] = interruption
        try:
            yield
        finally:
            if self._named[key] is interruption:
                del self._named[key]

    async def drain(self, grace_s: float) -> None:
        """Refuse what comes; wait for what is open; after `grace_s` cut it with an error that its
        clients can see."""
        self._draining = True
        if await self._is_idle_within(grace_s):
            return
        for interruption in list(self._open):
            interruption.interrupt(_stopping())
        await self._is_idle_within(CUT_S)

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _stopping() -> PdserveError:
    return Unavailable("the router is stopping", retry_after_s=1.0)
