"""Who runs, who waits and who is refused: admission without tasks or timers. Time is passed in as a
clock, and whoever waits hears of its turn by a call, made synchronously."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    Refusal,
)
from pdserve.types import ServiceClass
from router.admission.drain import MeasuredDrain
from router.admission.limits import AdmissionLimits, Bid, Reservation
from router.admission.order import ModelQueue, Waiting, scan
from router.admission.promises import KEPT, KEPT_TIME, Promises
from router.admission.tenants import OPEN, Tenants
from router.admission.term import refusal, term_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.admission.drain import DrainPredictor
    from router.admission.tenants import Stay
    from router.admission.term import Term

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
    """A request's place in the queue. From its `latest_start` on it is late, as far as could be
    predicted when it came."""

    bid: Bid = field(default_factory=lambda: Bid(""))
    stay: Stay = OPEN
    came: float = 0.0
    latest_start: float = math.inf

    @property
    def ends_at(self) -> float | None:
        """When whoever waits is to give up, and calls `Gate.expire`."""
        return self.latest_start if math.isfinite(self.latest_start) else None

    reserve: Callable[[], Reservation | None] = lambda: None
    waiter: Waiter[Reservation] | None = None


class _Line:
    """What waits for one model. `blocked` are those that had no room at the last look."""

    def __init__(self) -> None:
        self.queue = ModelQueue()
        self.promises = Promises()
        self.blocked: list[Waiting] = []


class Gate:
    """State: requests running, and a line a model; changed by `offer`, `leave`, `expire`, `wake`
    and the release of a grant."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        clock: Callable[[], float],
        drain: DrainPredictor | None = None,
        tenants: Tenants | None = None,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        """`on_freed` is told that a seat was given back, and has to call `wake`, which it is where
        there is none."""
        self._limits = limits
        self._clock = clock
        self.drain = drain or MeasuredDrain()
        self.tenants = tenants or Tenants()
        self._lines: dict[str, _Line] = {}
        self.running = 0
        self.queued = 0
        self._queued_of: dict[str, int] = {}
        self._running_batch = 0
        self._on_freed = on_freed or self.wake
        self._is_freed = False  # a seat was given back, and nobody was woken since

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
        if self._is_freed and self.queued:
            self.wake()  # a seat is free for one of those before it
        stay = self.tenants.enter(bid, now)
        try:
            line = self._line(bid.model)
            term = term_of(bid, now, self._limits, self.drain)
            _check_alone(term, now)
            if not line.queue and self._has_seat(bid):
                if line.promises:
                    line.promises.claim(hash(bid.identity), now)
                reservation = reserve()
                if reservation is not None:
                    return self._grant(bid, stay, reservation)
            place = _place(bid, stay, term, now)
            self._check(line, place, now)
        except BaseException:
            stay.refuse(now)
            raise
        self._enqueue(line, place, now)
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

    def _enqueue(self, line: _Line, place: Place, now: float) -> None:
        if not line.queue:
            self.drain.waits(place.bid.model, True, now)
        line.queue.push(place)
        self._queued_of[place.tenant] = self._queued_of.get(place.tenant, 0) + 1
        self.queued += 1

    def _check(self, line: _Line, place: Place, now: float) -> None:
        """Refuse, before anything is computed for it, what cannot be in time where it would stand
        in the queue, and what finds the queue full; new requests, also what would take the room
        that is kept for others."""
        bid, promises = place.bid, line.promises
        allowed_s = place.latest_start - now
        promised = bool(promises) and promises.claim(hash(bid.identity), now)
        kept = 0.0 if promised else promises.kept(now)
        if promised and math.isfinite(allowed_s):
            # Before all others of its priority: it has waited elsewhere.
            place.due = now - allowed_s
        wait_s = self.drain.wait_s(bid.model, line.queue.work_before(place), now) or 0.0
        if wait_s and math.isfinite(allowed_s):
            kept_s = min(kept * (self.drain.turn_s(bid.model, now) or 0.0), KEPT_TIME * allowed_s)
            if wait_s + kept_s > allowed_s:
                late_s = max(0.0, wait_s - allowed_s)
                raise self._late(line, place, late_s, now, promised=promised)
        limit = self._limits.max_queued_requests
        if self.queued + min(int(kept), int(KEPT * limit)) < limit:
            return
        greedier = self._greedier_than(place)
        if greedier is None:
            raise self._full(line, place, now, promised=promised)
        if self.queued >= limit:
            self._displace(greedier, now)

    def _term(self, place: Place) -> Term:
        return term_of(place.bid, place.came, self._limits, self.drain)

    def _late(
        self, line: _Line, place: Place, late_s: float, now: float, *, promised: bool = False
    ) -> PdserveError:
        retry_after_s = self._retry_after_s(line, place.bid, now, promised=promised)
        return refusal(self._term(place), late_s, retry_after_s)

    def _full(self, line: _Line, place: Place, now: float, *, promised: bool = False) -> Overloaded:
        retry_after_s = self._retry_after_s(line, place.bid, now, promised=promised)
        seats = self.running >= self._limits.max_running_requests
        return Overloaded(
            f"{self.running} requests are running and {self.queued} are waiting"
            f"{'' if seats else ' for room for their KV'}; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=Refusal.QUEUE_FULL if seats else Refusal.NO_ROOM,
        )

    def _retry_after_s(self, line: _Line, bid: Bid, now: float, *, promised: bool) -> float:
        """Then a place is kept for it."""
        identity = hash(bid.identity)
        turn_s = self.drain.turn_s(bid.model, now) or self._limits.default_retry_after_s
        tell = line.promises.renew if promised else line.promises.make
        return tell(identity, turn_s, now)

    def _greedier_than(self, place: Place) -> str | None:
        """The tenant that has the most places by its weight, where it has more than this one's
        would have with another: shares of a full queue are as those of the grants."""
        weight = self.tenants.weight
        shares = {name: count / weight(name) for name, count in self._queued_of.items()}
        most = max(shares, key=lambda name: shares[name], default=None)
        mine = (self._queued_of.get(place.tenant, 0) + 1) / weight(place.tenant)
        return most if most is not None and shares[most] > mine else None

    def _displace(self, tenant: str, now: float) -> None:
        """Refuse the last of a tenant's requests, to make room for one of another's."""
        for line in self._lines.values():
            place = cast("Place | None", line.queue.last_of(tenant))
            if place is not None:
                self._refuse(line, place, self._full(line, place, now), now)
                return

    def _refuse(self, line: _Line, place: Place, error: PdserveError, now: float) -> None:
        line.queue.left(place)
        self._left(line, place)
        place.stay.refuse(now)
        assert place.waiter is not None, "a place is refused when its waiter is known"
        place.waiter.refused(error)

    def expire(self, place: Place) -> PdserveError:
        """Take out a place whose time to wait, `ends_at`, is over, and say why."""
        line, now = self._line(place.bid.model), self._clock()
        if not place.gone:  # as it is where others were woken in the same breath
            line.queue.left(place)
            self._left(line, place)
            place.stay.refuse(now)
            if place in line.blocked:
                # Those behind may fit where this one did not.
                self.wake()
        if place.bid.deadline is not None and place.bid.deadline <= now:
            return DeadlineExceeded("the deadline passed while the request was queued")
        return self._late(line, place, max(0.0, now - place.latest_start), now)

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
        left = self._queued_of[place.tenant] = self._queued_of[place.tenant] - 1
        if not left:
            del self._queued_of[place.tenant]
        if not line.queue:
            self.drain.waits(place.bid.model, False, self._clock())

    def wake(self) -> None:
        """Admit whom seats and room allow; called when either grew. Models take turns."""
        self._is_freed = False
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
            outcome = self._try(line, cast("Place", waiting))
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
            self._refuse(line, place, found[0], now)
        else:
            line.queue.granted(place)
            self.drain.granted(place.bid.model, place.work_tokens, now)
            self._left(line, place)
            waiter.granted(self._grant(place.bid, place.stay, found[0]))
        return True

    def _try(self, line: _Line, place: Place) -> Reservation | PdserveError | None:
        if place.waiter is None or place.waiter.is_gone:
            return Cancelled("the client went away")
        now = self._clock()
        late_s = now - self._term(place).latest_start
        if late_s > 0.0:
            return self._late(line, place, late_s, now)
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
            self._is_freed = True
            self._on_freed()

        return Grant(reservation, on_release)

    def queued_of(self, model: str) -> int:
        line = self._lines.get(model)
        return 0 if line is None else len(line.queue)


def _place(bid: Bid, stay: Stay, term: Term, now: float) -> Place:
    return Place(
        prompt_tokens=bid.prompt_tokens,
        kv_tokens=bid.kv_tokens,
        work_tokens=bid.work_tokens,
        priority=bid.priority,
        due=term.due,
        service_class=bid.service_class,
        tenant=bid.tenant,
        weight=stay.weight,
        bid=bid,
        stay=stay,
        came=now,
        latest_start=term.latest_start,
    )


def _check_alone(term: Term, now: float) -> None:
    """Refuse what would be late though it went at once: there is no use in waiting."""
    late_s = now - term.latest_start
    if late_s > 0.0:
        raise refusal(term, late_s, max(1.0, late_s))
