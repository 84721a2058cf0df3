"""Requests that HTTP and gRPC are answering, so that a stop can wait for them and then end them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from pdserve.errors import Conflict, Unavailable

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

# For a request that is ended to tell its client so.
END_S = 1.0


class OpenRequest:
    """One request, answered by one task, as long as that is in this context. `error` is set if
    somebody else ended it, `claimed` if it has an idempotency key."""

    def __init__(self, requests: OpenRequests, task: asyncio.Task[Any]) -> None:
        self._requests, self._task = requests, task
        self._cancelling = task.cancelling()
        self.claimed: tuple[str, str] | None = None
        self.error: PdserveError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, raised: BaseException | None, *__: object) -> None:
        self._requests.leave(self)
        # As in asyncio.timeout: a cancellation from elsewhere stays one.
        is_cancelled = isinstance(raised, asyncio.CancelledError) and self.error is not None
        if is_cancelled and self._task.uncancel() <= self._cancelling:
            assert self.error is not None
            raise self.error from None

    def end(self, error: PdserveError) -> None:
        """Cancel the task; leaving the context turns the cancellation into `error`."""
        if self.error is None:
            self.error = error
            self._task.cancel()


class OpenRequests:
    """State: the open requests, those with an idempotency key, and whether the router stops."""

    def __init__(self) -> None:
        self._open: set[OpenRequest] = set()
        self._claimed: dict[tuple[str, str], OpenRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def check_open(self) -> None:
        """Raises Unavailable once the router is stopping."""
        if self._stopping:
            raise _stopping()

    def enter(self) -> OpenRequest:
        """Answer a request in the current task. Raises Unavailable once the router is stopping."""
        self.check_open()
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(self, task)
        self._open.add(request)
        self._idle.clear()
        return request

    def leave(self, request: OpenRequest) -> None:
        if request.claimed and self._claimed.get(request.claimed) is request:
            del self._claimed[request.claimed]
        self._open.discard(request)
        if not self._open:
            self._idle.set()

    def claim(self, request: OpenRequest, tenant: str, key: str, resumes: bool) -> None:
        """Make this the tenant's only open request with the idempotency key `key`, if it has one.

        A request that resumes ends the other one. Raises Conflict for one that does not.
        """
        if not key:
            return
        other = self._claimed.get((tenant, key))
        if other is not None:
            if not resumes:
                raise Conflict(f"request {key!r} is being answered", retry_after_s=1.0)
            other.end(Conflict(f"request {key!r} is resumed by another connection"))
        request.claimed = (tenant, key)
        self._claimed[request.claimed] = request

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait `grace_s` for open ones, then end them with an error."""
        self._stopping = True
        if await self._is_idle_within(grace_s):
            return
        for request in list(self._open):
            request.end(_stopping())
        await self._is_idle_within(END_S)

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _stopping() -> PdserveError:
    return Unavailable("the router is stopping", retry_after_s=1.0)
