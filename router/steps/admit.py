"""Waits for the request's turn, and reserves workers for its first attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from pdserve.errors import Unavailable
from router.admission import NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest
    from router.admission import AdmissionController
    from router.attempt.placer import Reservation
    from router.placement.values import Demand
    from router.walk import Answered, Proceed, Walk


class Placing(Protocol):
    """Chooses workers: Placer, or PoolingPlacer for embeddings."""

    def demand(self, request: GenerateRequest, session_workers: frozenset[str]) -> Demand: ...
    def reserve(self, demand: Demand) -> Reservation: ...


class AdmitStep:
    """Holds the slot and the reservation until the answer ends. Raises Overloaded and Unavailable.

    One step, because nothing may be awaited between the turn of a request and its reservation.
    """

    def __init__(
        self,
        admission: AdmissionController,
        placing: Placing,
        now: Callable[[], float],
        can_leave: Callable[[GenerateRequest], bool] = lambda _: False,
    ) -> None:
        """`can_leave`: whether another region can take a request."""
        self._admission, self._placing, self._now = admission, placing, now
        self._can_leave = can_leave

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        demand = self._placing.demand(walk.request, walk.last_workers)
        with self._admission.enter(walk.request, kv_tokens=demand.kv_tokens) as slot:
            while True:
                await slot.turn()
                try:
                    reservation = self._placing.reserve(demand)
                except Unavailable as reason:
                    if not isinstance(reason, NoRoom) and self._can_leave(walk.request):
                        raise  # another region serves it sooner than a worker that starts
                    slot.wait_for(reason)
                else:
                    break
            with reservation:
                slot.take()
                walk.record.admitted = self._now()
                return await proceed(structs.replace(walk, demand=demand, reservation=reservation))
