"""Who runs, who waits and who is refused: admission without tasks or timers. Time is passed in as a
clock, and whoever waits hears of its turn by a call, made synchronously."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    Refusal,
    Unavailable,
)
from pdserve.types import ServiceClass
from router.admission.drain import MeasuredDrain
from router.admission.limits import AdmissionLimits, Bid, Reservation
from router.admission.order import ModelQueue, Waiting, scan
from router.admission.promises import Promises
from router.admission.tenants import OPEN, Tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from router.admission.drain import DrainPredictor
    from router.admission.tenants import Stay

# Among requests of one priority, one goes before another that came so many times its own predicted
# prefill earlier.
STRETCH = 4.0
# Seconds a prompt token, until prefills were measured: the order needs their ratios alone.
_ASSUMED_PREFILL_S = 0.001

R = TypeVar("R", bound=Reservation)


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


class Waiter(Protocol[R]):
    """Hears once how its wait ended. One that `is_gone` is not granted anything."""

    @property
    def is_gone(self) -> bool: ...

    def granted(self, grant: Grant[R]) -> None: ...

    def refused(self, error: PdserveError) -> None: ...


@dataclass(slots=True, eq=False)
class Place(Waiting):
    """A request's place in the queue."""

    bid: Bid = field(default_factory=lambda: Bid(""))
    stay: Stay = OPEN
    reserve: Callable[[], Reservation | None] = lambda: None
    waiter: Waiter[Reservation] | None = None


class _Line:
    """What waits for one model. `blocked` are those that had no room at the last look."""

    def __init__(self) -> None:
        self.queue = ModelQueue()
        self.promises = Promises()
        self.blocked: list[Waiting] = []
        self.work_tokens = 0


class Gate:
    """State: requests running, and a line a model; changed by `offer`, `leave`, `wake` and the
    release of a grant."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        clock: Callable[[], float],
        drain: DrainPredictor | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self.drain = drain or MeasuredDrain()
        self.tenants = tenants or Tenants()
        self._lines: dict[str, _Line] = {}
        self.running = 0
        self.queued = 0
        self._running_batch = 0

    def offer(
        self, bid: Bid, reserve: Callable[[], R | None], waiter: Waiter[R]
    ) -> Grant[R] | Place:
        """A grant now, or a place in the queue, whose end `waiter` hears.

        Raises what `reserve` raises; DeadlineExceeded for a deadline that has passed; Overloaded
        or Unavailable, with the reason and when to come again, for a request that is refused.
        """
        now = self._clock()
        if bid.deadline is not None and bid.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        stay = self.tenants.enter(bid, now)
        try:
            line = self._line(bid.model)
            if not line.queue and self._has_seat(bid):
                self._check_deadline(line, bid, now)
                reservation = reserve()
                if reservation is not None:
                    return self._grant(bid, stay, reservation)
            place = self._enqueue(line, bid, stay, now)
        except BaseException:
            stay.refuse(now)
            raise
        place.reserve = reserve
        place.waiter = cast("Waiter[Reservation]", waiter)
        return place

    def settle(self, place: Place) -> None:
        """Let a new place pass those that wait for more room than it needs. Called once `waiter`
        can hear of it."""
        line = self._line(place.bid.model)
        if self._has_seat(place.bid) and not any(map(place.needs_no_less_than, line.blocked)):
            self._advance(line)

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line()
        return line

    def _has_seat(self, bid: Bid) -> bool:
        return self.running < self._limits.max_running_requests and (
            bid.service_class is not ServiceClass.BATCH or self._has_batch_seat
        )

    @property
    def _has_batch_seat(self) -> bool:
        return self._running_batch < self._limits.max_running_batch

    def _enqueue(self, line: _Line, bid: Bid, stay: Stay, now: float) -> Place:
        self._check_deadline(line, bid, now)
        self._check_queue(line, bid, now)
        place = Place(
            prompt_tokens=bid.prompt_tokens,
            kv_tokens=bid.kv_tokens,
            work_tokens=bid.work_tokens,
            priority=bid.priority,
            due=self._due(bid, now),
            service_class=bid.service_class,
            tenant=bid.tenant,
            weight=stay.weight,
            bid=bid,
            stay=stay,
        )
        if not line.queue:
            self.drain.waits(bid.model, True, now)
        line.queue.push(place)
        line.work_tokens += bid.work_tokens
        self.queued += 1
        return place

    def _due(self, bid: Bid, now: float) -> float:
        """STRETCH times its own prefill after it came, or its latest start where that is sooner."""
        prefill_s = self.drain.prefill_s(bid.model, bid.prompt_tokens)
        if prefill_s is None:
            prefill_s = bid.prompt_tokens * _ASSUMED_PREFILL_S
        due = now + STRETCH * prefill_s
        return due if bid.deadline is None else min(due, bid.deadline - prefill_s)

    def _check_deadline(self, line: _Line, bid: Bid, now: float) -> None:
        """Refuse what cannot have its first token in time, before anything is computed for it."""
        if bid.deadline is None:
            return
        late_s = now + (self.drain.prefill_s(bid.model, bid.prompt_tokens) or 0.0) - bid.deadline
        if line.queue:
            whole_s = self.drain.wait_s(bid.model, line.work_tokens, now) or 0.0
            if late_s + whole_s > 0.0:
                ahead = self._work_ahead(line, bid, now)
                late_s += self.drain.wait_s(bid.model, ahead, now) or 0.0
        if late_s > 0.0:
            left_s = bid.deadline - now
            raise Unavailable(
                f"the deadline is in {left_s:.2f} s, and the first token is predicted "
                f"{late_s:.2f} s after it",
                retry_after_s=late_s,
                reason=Refusal.DEADLINE_UNREACHABLE,
            )

    def _work_ahead(self, line: _Line, bid: Bid, now: float) -> float:
        """Tokens that are granted before a request that comes now, at the least: those of its class
        and tenant that go before it, and what other tenants have meanwhile by their weights."""
        rank = (bid.priority, self._due(bid, now))
        own = others = 0
        weights: dict[str, float] = {}
        for place in cast("Iterator[Place]", line.queue.in_order()):
            if place.service_class is not bid.service_class:
                continue
            if place.tenant != bid.tenant:
                others += place.work_tokens
                weights[place.tenant] = place.weight
            elif (place.priority, place.due) <= rank:
                own += place.work_tokens
        return own + min(others, own * sum(weights.values()) / self.tenants.weight(bid.tenant))

    def _check_queue(self, line: _Line, bid: Bid, now: float) -> None:
        """Refuse what finds the queue full, or all of its free places kept for others."""
        limit = self._limits.max_queued_requests
        promises = line.promises
        if self.queued < limit and self.queued + len(promises) < limit:
            return
        identity = hash(bid.identity)
        promised = promises.claim(identity, now)
        if self.queued < limit and (promised or self.queued + promises.kept(now) < limit):
            return
        turn_s = self.drain.turn_s(bid.model, now) or self._limits.default_retry_after_s
        retry_after_s = (
            promises.renew(identity, now) if promised else promises.make(identity, turn_s, now)
        )
        seats = self.running >= self._limits.max_running_requests
        raise Overloaded(
            f"{self.running} requests are running and {self.queued} are waiting"
            f"{'' if seats else ' for room for their KV'}; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=Refusal.QUEUE_FULL if seats else Refusal.NO_ROOM,
        )

    def leave(self, place: Place) -> None:
        """Give a place up; one that is over already is none."""
        if place.gone:
            return
        line = self._line(place.bid.model)
        line.queue.left(place)
        self._left(line, place)
        place.stay.release(self._clock())
        # Those behind may fit where this one did not.
        self.wake()

    def _left(self, line: _Line, place: Place) -> None:
        self.queued -= 1
        line.work_tokens -= place.work_tokens
        if not line.queue:
            self.drain.waits(place.bid.model, False, self._clock())

    def wake(self) -> None:
        """Admit whom seats and room allow; called when either grew. Models take turns."""
        waiting = [(model, line) for model, line in self._lines.items() if line.queue]
        for _, line in waiting:
            line.blocked = []
        while waiting:
            again = []
            for model, line in waiting:
                if self._advance(line):
                    again.append((model, line))
                    # Whoever was served goes to the end of the next round's order.
                    self._lines[model] = self._lines.pop(model)
            waiting = again

    def _advance(self, line: _Line) -> bool:
        """Admit, or refuse, at most one of a line; False where nobody could go."""
        if self.running >= self._limits.max_running_requests or not line.queue:
            return False
        found: list[Reservation | PdserveError] = []

        def has_room(waiting: Waiting) -> bool:
            outcome = self._try(cast("Place", waiting))
            if outcome is not None:
                found.append(outcome)
            return outcome is not None

        result = scan(line.queue, has_room, with_batch=self._has_batch_seat)
        line.blocked = result.blocked
        if result.chosen is None:
            return False
        place, now = cast("Place", result.chosen), self._clock()
        waiter = place.waiter
        assert waiter is not None, "a place is tried when its waiter is known"
        if isinstance(found[0], PdserveError):
            line.queue.left(place)
            self._left(line, place)
            place.stay.refuse(now)
            waiter.refused(found[0])
        else:
            line.queue.granted(place)
            self.drain.granted(place.bid.model, place.work_tokens, now)
            self._left(line, place)
            waiter.granted(self._grant(place.bid, place.stay, found[0]))
        return True

    def _try(self, place: Place) -> Reservation | PdserveError | None:
        bid = place.bid
        if place.waiter is None or place.waiter.is_gone:
            return Cancelled("the client went away")
        if bid.deadline is not None:
            prefill_s = self.drain.prefill_s(bid.model, bid.prompt_tokens) or 0.0
            late_s = self._clock() + prefill_s - bid.deadline
            if late_s > 0.0:
                return Unavailable(
                    f"the turn came too late: the first token would be {late_s:.2f} s after the "
                    "deadline",
                    retry_after_s=late_s,
                    reason=Refusal.DEADLINE_UNREACHABLE,
                )
        try:
            return place.reserve()
        except PdserveError as error:
            return error

    def _grant(self, bid: Bid, stay: Stay, reservation: R) -> Grant[R]:
        is_batch = bid.service_class is ServiceClass.BATCH
        self.running += 1
        self._running_batch += is_batch

        def on_release() -> None:
            self.running -= 1
            self._running_batch -= is_batch
            stay.release(self._clock())
            self.wake()

        return Grant(reservation, on_release)

    def queued_of(self, model: str) -> int:
        line = self._lines.get(model)
        return 0 if line is None else len(line.queue)
