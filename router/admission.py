"""Admission: how many requests run, how many wait, and in which order.

A request runs when a seat is free and `reserve`, a synchronous attempt to place it and to promise
it its KV blocks, succeeds. Otherwise it waits its turn: first come, first served among the requests
of one model, so that a large request is not overtaken for ever by small ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pdserve import deadline as deadlines
from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RETRY_AFTER_S = 600.0
RATE_WINDOW = 64


class Reservation(Protocol):
    """What a request holds while it runs. Releasing again does nothing."""

    def release(self) -> None: ...


R = TypeVar("R", bound=Reservation)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """At most so many requests run and wait. `default_retry_after_s` is what an overloaded client
    is told while no rate has been measured."""

    max_running_requests: int = 256
    max_queued_requests: int = 1024
    default_retry_after_s: float = 1.0


class Grant(Generic[R]):
    """The right to run, and what was reserved for it. Released once; again does nothing."""

    __slots__ = ("_on_release", "reservation")

    def __init__(self, reservation: R, on_release: Callable[[], None]) -> None:
        self.reservation = reservation
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            self.reservation.release()
            on_release()


class _Waiter(Generic[R]):
    """One request in the queue: `order` counts arrivals over all models."""

    __slots__ = ("granted", "order", "reserve")

    def __init__(self, reserve: Callable[[], R | None], order: int) -> None:
        self.reserve = reserve
        self.order = order
        self.granted: asyncio.Future[Grant[R]] = asyncio.get_running_loop().create_future()


class Admission:
    """State: requests running, and a queue of waiters a model; changed by `acquire`, `wake` and the
    release of a grant."""

    def __init__(
        self, limits: AdmissionLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._running = 0
        self._arrivals = 0
        self._queues: dict[str, deque[_Waiter[Any]]] = {}
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def running(self) -> int:
        return self._running

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    async def acquire(
        self, model: str, reserve: Callable[[], R | None], *, deadline: float | None
    ) -> Grant[R]:
        """The right to run with what `reserve` returned; the caller releases it.

        `reserve` returns None where room must be waited for, and is tried again at each `wake`;
        what it raises is raised here. Raises Overloaded where the queue is full and
        DeadlineExceeded where the turn did not come in time.
        """
        if deadlines.remaining(deadline) == 0.0:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        if model not in self._queues and self._running < self._limits.max_running_requests:
            reservation = reserve()
            if reservation is not None:
                return self._grant(reservation)
        if self.queued >= self._limits.max_queued_requests:
            retry_after_s = self.retry_after_s()
            raise Overloaded(
                f"{self._running} requests are running and {self.queued} are waiting; "
                f"try again in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )
        return await self._wait(model, reserve, deadline)

    async def _wait(
        self, model: str, reserve: Callable[[], R | None], deadline: float | None
    ) -> Grant[R]:
        waiter = _Waiter(reserve, self._arrivals)
        self._arrivals += 1
        self._queues.setdefault(model, deque()).append(waiter)
        try:
            async with deadlines.timeout(deadline):
                return await waiter.granted
        except BaseException as error:
            self._abandon(model, waiter)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the deadline passed while the request was queued") from None
            raise

    def _abandon(self, model: str, waiter: _Waiter[R]) -> None:
        """Leave the queue; give back what was granted in the same breath as the cancellation."""
        if waiter.granted.done() and not waiter.granted.cancelled():
            if waiter.granted.exception() is None:
                waiter.granted.result().release()
            return
        # Those behind may fit where this one did not.
        self._remove(model, waiter)
        self.wake()

    def wake(self) -> None:
        """Admit whom seats and room allow, in order of arrival; called when either grew."""
        blocked: set[str] = set()
        while self._running < self._limits.max_running_requests:
            heads = [(q[0].order, name) for name, q in self._queues.items() if name not in blocked]
            if not heads:
                return
            _, model = min(heads)
            if not self._admit_head(model):
                blocked.add(model)

    def _admit_head(self, model: str) -> bool:
        """Try the first waiter of `model`; False where it must go on waiting."""
        waiter = self._queues[model][0]
        if not waiter.granted.done():
            try:
                reservation = waiter.reserve()
            except PdserveError as error:
                waiter.granted.set_exception(error)
            else:
                if reservation is None:
                    return False
                waiter.granted.set_result(self._grant(reservation))
        self._remove(model, waiter)
        return True

    def _remove(self, model: str, waiter: _Waiter[Any]) -> None:
        queue = self._queues.get(model, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[model]

    def _grant(self, reservation: R) -> Grant[R]:
        self._running += 1
        return Grant(reservation, self._on_release)

    def _on_release(self) -> None:
        self._running -= 1
        self._ends.append(self._clock())
        self.wake()

    def retry_after_s(self) -> float:
        """Seconds until those who wait now will have been admitted, at the rate at which requests
        have been ending; the stated default while fewer than two have ended."""
        if len(self._ends) < 2:
            return self._limits.default_retry_after_s
        rate = len(self._ends) / max(self._clock() - self._ends[0], 1e-3)
        return min(max(1, self.queued) / rate, MAX_RETRY_AFTER_S)
