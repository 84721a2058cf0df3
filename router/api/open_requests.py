"""Open requests of the HTTP and gRPC APIs. A stop waits for them, then ends them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from pdserve.errors import Conflict, Unavailable

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from router.admission.memory import MemoryGuard

# Time for an ended request to send its error to the client.
END_S = 1.0


class OpenRequest:
    """One request, open while its task is in this context. `error`: set if another task ended it.
    `claimed`: tenant and idempotency key, if it has one."""

    def __init__(self, requests: OpenRequests, task: asyncio.Task[Any]) -> None:
        self._requests, self._task = requests, task
        self._cancelling = task.cancelling()
        self.claimed: tuple[str, str] | None = None
        self.error: PdserveError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, raised: BaseException | None, *__: object) -> None:
        self._requests.leave(self)
        # As in asyncio.timeout: a cancellation that did not come from `end` propagates.
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
    """State: the open requests, those with an idempotency key, and whether the router is stopping.
    `memory` refuses new requests if memory is nearly full."""

    def __init__(self, memory: MemoryGuard | None = None) -> None:
        self._memory = memory
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
        """Open a request that the current task answers. Raises as `check_new` does."""
        self.check_new()
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
        """Claim the idempotency key `key` for a request; "" is no key.

        If another open request of the tenant has the key, a request that resumes ends that one.
        Otherwise raises Conflict.
        """
        if not key:
            return
        other = self._claimed.get((tenant, key))
        if other is not None:
            if not resumes:
                raise Conflict(f"request {key!r} is being answered", retry_after_s=1.0)
            self.end_claimed((tenant, key))
        request.claimed = (tenant, key)
        self._claimed[request.claimed] = request

    def check_new(self) -> None:
        """Raises Unavailable as `check_open` does, and Overloaded if memory is nearly full."""
        self.check_open()
        if self._memory is not None and self._memory.used > self._memory.shed_above:
            raise self._memory.refusal()

    def end_claimed(self, name: tuple[str, str]) -> None:
        """End the open request with this tenant and key, if any: its client has resumed it on
        another connection."""
        if (request := self._claimed.get(name)) is not None:
            request.end(Conflict(f"request {name[1]!r} is resumed by another connection"))

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
