"""One simulated request: waits for its grant, and goes through prefill, transfer and decode. Where
a worker is to have another role before it has ended there, it goes on elsewhere, as the router's
ladder has it: after the tokens that it has, which are computed again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.simulation.jobs import Job, Part
from pdserve.errors import DeadlineExceeded, Unavailable
from pdserve.types import Receipt, Usage
from router.ladder import MOVED, Failure, Ladder

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.simulation.arrivals import Arrival
    from benchmarks.simulation.engine import Engine
    from benchmarks.simulation.service import Service
    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest
    from router.admission.gate import Grant, Place
    from router.booking import Booking

TRANSPORT = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended; times are the simulation's. `error` is empty where it was answered,
    else the refusal's reason or the error's code; `retry_after_s` is what it was told with it.
    `admission_s` is its wait in the router. Of one that was refused and came again, `arrived_s` is
    when it came first, and `tries` how often it did. `moves` are those to other workers."""

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    admission_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    retry_after_s: float = 0.0
    tries: int = 1
    moves: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None where there is one token."""
        gaps = self.output_tokens - 1
        return (self.last_s - self.first_s) / gaps if gaps else None

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was answered within both limits."""
        gap_s = self.tpot_s
        return not self.error and self.ttft_s <= ttft_s and (gap_s is None or gap_s <= tpot_s)


class Flight:
    """The waiter of one request, then its legs. Ends once: answered, refused or too late.

    State: the booking that it runs by, its jobs, and how many tokens it `has` from before its last
    move."""

    def __init__(
        self,
        service: Service,
        request: GenerateRequest,
        arrival: Arrival,
        on_end: Callable[[Outcome], None],
    ) -> None:
        self.place: Place | None = None
        self._service = service
        self._clock = service.clock
        self._request = request
        self._arrival = arrival
        self._on_end = on_end
        self._arrived_s = self._placed_s = self._first_s = self._clock.now_s
        self._grant: Grant[Booking] | None = None
        self._booking: Booking | None = None
        self._jobs: list[tuple[Engine, Job]] = []
        self._transfer_s: float | None = None
        self._has = self._moves = 0
        self._ladder = Ladder()
        self._over = False
        assert request.deadline is not None, "the router gives every request one"
        self._clock.at(request.deadline, self._expire)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def is_gone(self) -> bool:
        return self._over

    def wait(self, place: Place) -> None:
        """Until it is granted, refused or too late."""
        self.place = place
        if place.ends_at is not None:
            self._clock.at(place.ends_at, lambda: self._give_up(place))

    def _give_up(self, place: Place) -> None:
        if not self._over and self.place is place:
            self.refused(self._service.gate.expire(place))

    def granted(self, grant: Grant[Booking]) -> None:
        self.place = None
        self._grant = grant
        self._placed_s = self._clock.now_s
        self._start(grant.reservation)

    def refused(self, error: PdserveError) -> None:
        self.place = None
        self._end(error.reason or error.code, error.retry_after_s or 0.0)

    def leave(self, engine: Engine) -> bool:
        """Go on elsewhere, if any of it is on `engine`: whether it was."""
        if self._over or not any(where is engine and not job.gone for where, job in self._jobs):
            return False
        booking, self._has = self._booking, self._tokens
        assert booking is not None, "it has jobs"
        prefill = "" if booking.prefill is None else booking.prefill.worker_id
        self._drop_jobs()
        booking.release()
        error = Unavailable(f"worker {engine.worker_id} changes its role")
        self._ladder.failed(Failure(engine.worker_id, prefill, error), self._has)
        again = self._placed_anew(prefill)
        if again is None:
            self._end(error.code)
            return True
        self._moves += 1
        self._start(again)
        return True

    def _placed_anew(self, prefill: str) -> Booking | None:
        """By the router's ladder; None at its top."""
        request = replace(self._request, resume=(0,) * self._has)
        booker, left = self._service.booker, self._arrival.output_tokens - self._has
        demand = booker.demand(request)
        while (rung := self._ladder.climb(prefill, pair_helps=left > 1)) is not None:
            try:
                booking = booker.book_again(demand, rung, cause=MOVED)
            except Unavailable:
                continue
            self._ladder.took(rung.step, MOVED, self._has)
            return booking
        return None

    @property
    def _tokens(self) -> int:
        """Of the answer, that were made so far."""
        made = max((engine.made(job) for engine, job in self._jobs), default=0)
        return self._has + made

    def _start(self, booking: Booking) -> None:
        self._booking = booking
        if booking.prefill is None:
            self._start_whole(booking)
        else:
            self._start_pair(booking)

    def _start_whole(self, booking: Booking) -> None:
        engine, charge = self._service.engine_of(booking.decode), booking.decode_charge

        def on_first(now: float) -> None:
            self._saw_first(now)
            charge.prefilled()

        job = self._job(Part.WHOLE, engine, on_first, lambda now: self._answered(now, booking))
        self._submit(engine, job)

    def _start_pair(self, booking: Booking) -> None:
        assert booking.prefill is not None, "a pair has a prefill worker"
        source = self._service.engine_of(booking.prefill)
        target = self._service.engine_of(booking.decode)
        decode = self._job(
            Part.DECODE, target, lambda now: None, lambda now: self._answered(now, booking)
        )

        def on_first(now: float) -> None:
            assert booking.prefill_charge is not None, "a pair charges both"
            self._saw_first(now)
            booking.prefill_charge.release()
            moved = self._prompt_tokens - self._cached_at(target)
            self._transfer_s = self._service.model.transfer_s(moved)
            hand_over = partial(self._hand_over, source, target, decode, prefill, now)
            self._clock.after(self._transfer_s, hand_over)

        prefill = self._job(Part.PREFILL, source, on_first, lambda now: None)
        self._submit(target, decode)
        self._submit(source, prefill)

    def _saw_first(self, now: float) -> None:
        """Of the answer, or of what is left of it."""
        if not self._has:
            self._first_s = now

    @property
    def _prompt_tokens(self) -> int:
        """With the answer's, as far as it is there: they are computed again."""
        return self._arrival.prompt_tokens + self._has

    def _cached_at(self, engine: Engine) -> int:
        caches = self._service.caches
        if caches is None:
            return 0
        return caches.hit(engine.worker_id, self._arrival.prefix, self._prompt_tokens)

    def _job(
        self,
        part: Part,
        engine: Engine,
        on_first: Callable[[float], None],
        on_end: Callable[[float], None],
    ) -> Job:
        prompt, output = self._prompt_tokens, self._arrival.output_tokens - self._has
        kept = prompt if part is Part.PREFILL else prompt + output
        blocks = engine.model.blocks_for(kept)
        return Job(part, prompt, output, blocks, on_first, on_end, self._arrival.prefix)

    def _submit(self, engine: Engine, job: Job) -> None:
        self._jobs.append((engine, job))
        self._clock.after(self._service.model.overhead_s, lambda: engine.submit(job))

    def _hand_over(
        self, source: Engine, target: Engine, decode: Job, prefill: Job, token_at: float
    ) -> None:
        target.receive(decode, token_at)
        source.give_up(prefill)

    def _answered(self, now: float, booking: Booking) -> None:
        if self._over:
            return
        self._over = True
        assert self._grant is not None, "only what was granted is answered"
        first = self._jobs[-1][1]
        booking.release()
        if not self._moves:  # as in the router: of a first attempt alone
            self._tell_booker(now, booking, first)
        self._tell("", now, cached_tokens=first.cached_tokens, booking=booking)
        self._grant.release()

    def _tell_booker(self, now: float, booking: Booking, first: Job) -> None:
        prefill = booking.prefill or booking.decode
        receipt = Receipt(
            queue_s=first.admitted_at - self._placed_s,
            prefill_s=self._first_s - first.admitted_at,
            exposed_transfer_s=self._transfer_s or 0.0,
            prefill_worker=prefill.worker_id,
            decode_worker=booking.decode.worker_id,
            transport="" if self._transfer_s is None else TRANSPORT,
        )
        self._service.booker.answered(
            booking.prediction,
            self._request.model,
            Usage(self._prompt_tokens, self._arrival.output_tokens, first.cached_tokens),
            receipt,
            ttft_s=self._first_s - self._placed_s,
            e2e_s=now - self._placed_s,
        )

    def _expire(self) -> None:
        if self._over:
            return
        place, self.place = self.place, None
        if place is not None:
            self._service.gate.leave(place)
        self._end(DeadlineExceeded.code)

    def _drop_jobs(self) -> None:
        for engine, job in self._jobs:
            engine.cancel(job)
        self._jobs = []

    def _end(self, error: str, retry_after_s: float = 0.0) -> None:
        self._over = True
        self._drop_jobs()
        self._tell(error, self._clock.now_s, retry_after_s=retry_after_s)
        if self._booking is not None:
            self._booking.release()
        if self._grant is not None:
            self._grant.release()

    def _tell(
        self,
        error: str,
        now: float,
        *,
        cached_tokens: int = 0,
        booking: Booking | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        prefill = None if booking is None else booking.prefill or booking.decode
        self._on_end(
            Outcome(
                request_id=self._request.request_id,
                arrived_s=self._arrived_s,
                prompt_tokens=self._arrival.prompt_tokens,
                output_tokens=self._arrival.output_tokens,
                error=error,
                admission_s=self._placed_s - self._arrived_s,
                first_s=self._first_s,
                last_s=now,
                cached_tokens=cached_tokens,
                prefill_worker="" if prefill is None else prefill.worker_id,
                decode_worker="" if booking is None else booking.decode.worker_id,
                retry_after_s=retry_after_s,
                moves=self._moves,
            )
        )
