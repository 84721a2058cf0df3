"""The n answers of one request, each with a flight of its own.

One of them leads: it goes from prefill to decode as a request alone would. The others fork from it:
they are submitted with it to its decode worker, begin there when its KV has come, and share the
blocks of the prompt. One prefill, one transfer, and from its first token on each answer falls back
by itself. Before that they are where the leader is: where it goes on elsewhere, so do they; where
its first token, sampled by prefill, is also its last, the next answer leads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError, Unavailable
from router.answer import AnswerDelta
from router.booking import fork_charge
from router.flight import Flight
from router.receipts import receipt_of_all, usage_of_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.types import GenerateRequest, Receipt, Usage
    from router.answer import AnswerSink
    from router.booking import Booker, Booking
    from router.fleet import Fleet
    from router.handoff_actions import Resubmit
    from router.ladder import LadderLimits
    from router.leg_stream import LegStream
    from router.member import Member
    from router.metrics import RouterMetrics
    from router.placement.values import Demand
    from router.prefix import PrefixMetrics
    from router.retry_budget import RetryBudget

logger = logging.getLogger(__name__)


class _Untold:
    """A tenant's usage is told once, of all answers."""

    def answered(self, tenant: str, usage: Usage) -> None:
        """Nothing: see above."""


class _Choice:
    """Where one flight tells of itself: the sink of its answer, and the observer of its end."""

    __slots__ = ("_all", "_index", "e2e_s", "outcome", "receipt", "ttft_s", "usage")

    def __init__(self, choices: Choices, index: int) -> None:
        self._all = choices
        self._index = index
        self.usage: Usage | None = None
        self.receipt: Receipt | None = None
        self.outcome = ""
        self.ttft_s = self.e2e_s = 0.0

    def push(self, delta: AnswerDelta) -> bool:
        if delta.usage is None:
            return self._all.sink.push(replace(delta, index=self._index))
        self.usage, self.receipt = delta.usage, delta.receipt
        return self._all.push_last(replace(delta, index=self._index, usage=None, receipt=None))

    def push_token(self, token_id: int, text: str) -> bool:
        if self._index == 0:
            return self._all.sink.push_token(token_id, text)
        return self._all.sink.push(AnswerDelta((token_id,), text, index=self._index))

    def end(self) -> None:
        """The answer has ended; `ended` follows."""

    def fail(self, error: PdserveError, *, drop: bool = False) -> None:
        self._all.fail(error, drop=drop)

    def answered(
        self, model: str, usage: Usage, receipt: Receipt, *, ttft_s: float, e2e_s: float
    ) -> None:
        self.ttft_s, self.e2e_s = ttft_s, e2e_s

    @property
    def tenants(self) -> _Untold:
        return _Untold()

    @property
    def prefix(self) -> PrefixMetrics:
        return self._all.metrics.prefix

    def fell_back(self, model: str, step: str, reason: str) -> None:
        self._all.metrics.fell_back(model, step, reason)

    def continued(self, model: str, source: str) -> None:
        self._all.metrics.continued(model, source)

    def ended(self, model: str, outcome: str) -> None:
        self.outcome = outcome
        self._all.ended(self._index)


class Choices:
    """State: the flights by index, which of them leads, and whether its KV has come."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        deadline: float | None,
        buffer: AnswerSink,
        fleet: Fleet,
        booker: Booker,
        metrics: RouterMetrics,
        budget: RetryBudget,
        limits: LadderLimits,
    ) -> None:
        self.sink = buffer
        self._model = request.model
        self._tenant = request.tenant
        self._booker = booker
        self.metrics = metrics
        self._choices = [_Choice(self, i) for i in range(request.sampling.n)]
        self._flights = [
            Flight(
                replace(request, sampling=request.sampling.of_choice(i)),
                deadline=deadline,
                buffer=choice,
                fleet=fleet,
                booker=booker,
                metrics=choice,
                budget=budget,
                limits=limits,
                siblings=self,
            )
            for i, choice in enumerate(self._choices)
        ]
        self._leader = self._flights[0]
        self._has_kv = False
        self._deferred: dict[Flight, Resubmit] = {}
        self._booking: Booking | None = None
        self._release: Callable[[], None] | None = None
        self._error: PdserveError | None = None

    def start(self, booking: Booking, demand: Demand, release: Callable[[], None]) -> None:
        """Submit to the workers that were booked; `release` is called when all have ended."""
        self._booking, self._demand, self._release = booking, demand, release
        for flight in self._flights:
            flight.wait(demand.without_forks(), _nothing)
        self._leader.lead(booking)

    def join(self, flight: Flight, member: Member) -> Sequence[LegStream]:
        if flight is not self._leader:
            return ()
        self._has_kv = False
        self._deferred.clear()
        if self._booking is not None and self._booking.forks_charge is not None:
            self._booking.forks_charge.release()
        return [
            x.join(member, fork_charge(member, self._demand))
            for x in self._unbegun()
            if x is not flight
        ]

    def spoke(self, flight: Flight) -> None:
        if flight is not self._leader or self._has_kv:
            return
        self._has_kv = True
        deferred, self._deferred = self._deferred, {}
        for each, action in deferred.items():
            each.resubmit(action)

    def defers(self, flight: Flight, action: Resubmit) -> bool:
        """A fork that failed although its leader got on fails by itself."""
        is_led = flight is not self._leader and not flight.handoff.tokens
        if not is_led or self._has_kv or self._leader.is_over:
            return False
        self._deferred[flight] = action
        return True

    def _unbegun(self) -> list[Flight]:
        return [x for x in self._flights if not x.is_over and not x.handoff.tokens]

    def push_last(self, delta: AnswerDelta) -> bool:
        """The last delta of one answer; that of the last one says what all have cost."""
        usages = [x.usage for x in self._choices if x.usage is not None]
        receipts = [x.receipt for x in self._choices if x.receipt is not None]
        if len(usages) == len(self._choices):
            usage, receipt = usage_of_all(usages), receipt_of_all(receipts)
            delta = replace(delta, usage=usage, receipt=receipt)
        return self.sink.push(delta)

    def fail(self, error: PdserveError, *, drop: bool = False) -> None:
        """One answer failed, and with it the request."""
        if self._error is None:
            self._error = error
            self.sink.fail(error, drop=drop)
            self.close()

    def ended(self, index: int) -> None:
        """A flight is over, and holds nothing any more."""
        if self._error is None and self._flights[index] is self._leader and not self._has_kv:
            self._promote()
        if all(x.is_over for x in self._flights):
            self._all_ended()

    def _promote(self) -> None:
        """Prefill ended the leader's answer, so that its KV went nowhere: another one leads."""
        unbegun = self._unbegun()
        if not unbegun:
            return
        ended = self._flights.index(self._leader)
        self._leader = unbegun[0]
        cause = f"answer {ended} ended with prefill's token, so that its KV went nowhere"
        try:
            booking = self._booker.book(self._demand.without_forks(), cause=cause)
            if booking is None:
                raise Unavailable(f"no decode worker of model {self._model} has room")
        except PdserveError as error:
            self.fail(error)
        else:
            self._leader.lead(booking)

    def _all_ended(self) -> None:
        release, self._release = self._release, None
        if release is None:
            return
        release()
        usages = [x.usage for x in self._choices if x.usage is not None]
        receipts = [x.receipt for x in self._choices if x.receipt is not None]
        if self._error is None and len(usages) == len(self._choices):
            self.sink.end()
            usage = usage_of_all(usages)
            self.metrics.tenants.answered(self._tenant, usage)
            self.metrics.answered(
                self._model,
                usage,
                receipt_of_all(receipts),
                ttft_s=min(x.ttft_s for x in self._choices),
                e2e_s=max(x.e2e_s for x in self._choices),
                longest=max(usage.completion_tokens for usage in usages),
            )
        outcome = self._choices[0].outcome if self._error is None else self._error.code
        self.metrics.ended(self._model, outcome)

    def move_off(self, worker_id: str, reason: str, *, live_only: bool = False) -> bool:
        """See Flight.move_off; until the KV has come the answers wait for one another, and stay.
        True where one has moved."""
        begun = [x for x in self._flights if self._has_kv and x.handoff.tokens]
        return sum(x.move_off(worker_id, reason, live_only=live_only) for x in begun) > 0

    def close(self) -> None:
        """The reader is gone, or one answer failed: end what is open."""
        for flight in self._flights:
            flight.close()


def _nothing() -> None:
    """A flight among others holds nothing but its streams."""
