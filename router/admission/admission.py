"""Admission as tasks see it: a request waits for its turn, its deadline or its cancellation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Generic

from pdserve import deadline as deadlines
from router.admission.gate import Gate, Grant, R

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from router.admission.drain import DrainPredictor
    from router.admission.limits import AdmissionLimits, Bid
    from router.admission.tenants import Tenants


class _Turn(Generic[R]):
    """Hands the end of a wait to the task that waits."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end: asyncio.Future[Grant[R]] | None = None

    @property
    def is_gone(self) -> bool:
        return self._end is None or self._end.done()

    def granted(self, grant: Grant[R]) -> None:
        assert self._end is not None
        self._end.set_result(grant)

    def refused(self, error: PdserveError) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_exception(error)

    def future(self) -> asyncio.Future[Grant[R]]:
        self._end = asyncio.get_running_loop().create_future()
        return self._end


class Admission:
    """State: a gate, and whether it is to be woken. `drain` predicts how its queue drains;
    `tenants` are those it knows."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        drain: DrainPredictor | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._gate = Gate(
            limits, clock=clock, drain=drain, tenants=tenants, on_freed=self.wake_soon
        )
        self._wakes_soon = False

    @property
    def running(self) -> int:
        return self._gate.running

    @property
    def queued(self) -> int:
        return self._gate.queued

    def queued_of(self, model: str) -> int:
        """Those of one model that wait."""
        return self._gate.queued_of(model)

    @property
    def drain(self) -> DrainPredictor:
        return self._gate.drain

    def wake(self) -> None:
        """Admit whom seats and room allow; called when either grew."""
        self._gate.wake()

    def wake_soon(self) -> None:
        """As `wake`, once for all of this turn of the loop. Of requests that end in one frame, each
        makes room for about one: who comes next would be tried in vain after each of them, and
        everybody behind it looked at."""
        if not self._wakes_soon:
            self._wakes_soon = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wakes_soon = False
        self.wake()

    async def acquire(self, bid: Bid, reserve: Callable[[], R | None]) -> Grant[R]:
        """The right to run with what `reserve` returned; the caller releases it.

        `reserve` returns None where room must be waited for, and is tried again; what it raises is
        raised here, as is what `Gate.offer` raises. One whose turn has not come when it must, to be
        in time, is refused as it would have been when it came. Raises DeadlineExceeded where the
        deadline passed.
        """
        turn: _Turn[R] = _Turn()
        outcome = self._gate.offer(bid, reserve, turn)
        if isinstance(outcome, Grant):
            return outcome
        granted = turn.future()
        self._gate.settle(outcome)
        try:
            async with deadlines.timeout(outcome.ends_at):
                return await granted
        except TimeoutError:
            if not granted.cancelled():
                return granted.result()  # it came in the same breath
            raise self._gate.expire(outcome) from None
        except BaseException:
            # Give back what was granted in the same breath as the cancellation.
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()
            self._gate.leave(outcome)
            raise
