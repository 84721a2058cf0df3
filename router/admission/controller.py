"""Admission control: bounds running and queued requests, and rejects requests that would be late.

A request gets its turn at once, waits for it in the queue of its model, or is rejected with a
Retry-After. In its turn it reserves workers, or says why it cannot and waits for another turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.types import ServiceClass
from router.admission.queue import AdmissionRate, Entry, ModelQueue, NoAdapterSlot, NoRoom
from router.admission.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pdserve.types import GenerateRequest

# Cap of the predicted length of an answer: most answers end before max_tokens.
PREDICTED_OUTPUT_TOKENS = 256
# Largest share of the running requests that may be of the batch class. The rest is kept free, so
# that an interactive request does not wait for a batch answer to end.
BATCH_SHARE = 0.75
# Retry-After if no worker is ready and nothing says when one will be.
UNAVAILABLE_RETRY_AFTER_S = 5.0
# A queued request looks at least this often whether its model has no workers any more.
MIN_CHECK_S = 0.05


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits of admission.

    `max_running_requests`: 0 means the number of slots of all engines. `queue_timeout_s`: longest
    wait for a missing worker. `max_ttft_s`: interactive requests with a higher predicted TTFT are
    rejected; 0 rejects none.
    """

    max_running_requests: int = 0
    max_queued_requests: int = 1024
    queue_timeout_s: float = 30.0
    max_ttft_s: float = 0.0


class LatencyEstimate(NamedTuple):
    """Predicted times of a request after admission: wait until prefill starts, prefill, and decode
    from the first to the last token."""

    wait_s: float
    prefill_s: float
    decode_s: float


class LatencyModel(Protocol):
    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Predict the times of a request. Return None while too little was measured."""
        ...


class Slot:
    """A request in admission: in the queue until `take`, then running until the exit. A context
    manager.

    One request of a model has its turn at a time. So after `turn`, call `take` or `wait_for`
    without waiting for anything else.
    """

    __slots__ = ("_admission", "_entry", "_is_taken")

    def __init__(self, admission: AdmissionController, entry: Entry) -> None:
        self._admission, self._entry, self._is_taken = admission, entry, False

    def __enter__(self) -> Self:
        return self

    async def turn(self) -> None:
        """Wait until the request may try to reserve workers.

        Raises Overloaded if the SLO cannot be met; Unavailable if the deadline cannot be met, or no
        worker was ready within `queue_timeout_s`; DeadlineExceeded if the deadline has passed.
        """
        await self._admission.turn_of(self._entry)

    def wait_for(self, reason: Unavailable) -> None:
        """End the turn without workers: wait for room if `reason` is NoRoom, otherwise for a worker
        that could serve the request. Raises Overloaded if the queue is full."""
        self._admission.wait(self._entry, reason)

    def take(self) -> None:
        """End the turn with workers: the request runs."""
        self._is_taken = True
        self._admission.admit(self._entry)

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A client that leaves the queue pays for what it requested; a rejected one does not.
        is_rejected = not self._is_taken and isinstance(error, PdserveError)
        self._admission.leave(self._entry, is_rejected=is_rejected)


@dataclass(slots=True)
class _Model:
    """State of one model. `in_turn`: the queued request that has its turn. `missing`: why no worker
    could serve the request that had the last turn, and since when."""

    queue: ModelQueue = field(default_factory=ModelQueue)
    rate: AdmissionRate = field(default_factory=AdmissionRate)
    in_turn: Entry | None = None
    missing: Unavailable | None = None
    missing_since: float = 0.0


class AdmissionController:
    """Admits requests. All methods run in one event loop."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        tenants: Tenants | None = None,
        latency: LatencyModel | None = None,
        slots: Callable[[], int] = int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`slots` returns the number of requests that all engines can run at the same time (sum of
        max_num_seqs). `clock`: default is the event loop's."""
        self.running = 0
        self.queued = 0
        self.tenants = tenants or Tenants()
        self._limits = limits
        self._latency, self._slots = latency, slots
        self._now = clock or asyncio.get_running_loop().time
        self._models = defaultdict[str, _Model](_Model)
        self._queued_of_tenant = Counter[str]()
        self._running_batch = 0
        self._wakes_soon = False

    def queued_of(self, model: str) -> int:
        state = self._models.get(model)
        return 0 if state is None else len(state.queue)

    def enter(self, request: GenerateRequest, *, kv_tokens: int = 0) -> Slot:
        """Charge a request to its tenant, and give it its turn or queue it. `kv_tokens`: largest KV
        that it can hold.

        Raises Overloaded if the queue or a limit of the tenant is full, or the SLO cannot be met;
        Unavailable if the deadline cannot be met, and DeadlineExceeded if it has passed.
        """
        now = self._now()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        if self._wakes_soon:
            self._wake()  # capacity was released: queued requests go before this one
        entry = self._charged(request, kv_tokens, now)
        model = self._models[request.model]
        try:
            if now > entry.latest_start:
                raise self._late(model, entry, now - entry.latest_start, now)
            if len(model.queue) or not self._has_slot(entry):
                self._push(model, entry, now)
                self._offer(model)
            else:
                self._give_slot(entry)
        except PdserveError:
            entry.account.refund(entry.work_tokens, entry.request.sampling.n)
            raise
        return Slot(self, entry)

    async def turn_of(self, entry: Entry) -> None:
        """Wait for the turn of a request that has entered."""
        while not entry.has_slot:
            entry.turn = asyncio.get_running_loop().create_future()
            timeout_s = self._timeout_s(self._models[entry.request.model], entry, self._now())
            await asyncio.wait((entry.turn,), timeout=timeout_s)

    def wait(self, entry: Entry, reason: Unavailable) -> None:
        """End the turn of a request that found no workers because of `reason`."""
        model, now = self._models[entry.request.model], self._now()
        self._release_slot(model, entry)
        if isinstance(reason, NoRoom):
            model.missing = None
            entry.waits_for_adapter = isinstance(reason, NoAdapterSlot)
        else:
            if model.missing is None:
                model.missing_since = now
            model.missing = copy(reason)  # its traceback would keep the request
        if not entry.is_queued:
            self._push(model, entry, now)
        model.queue.block(entry)
        self._offer_all()

    def admit(self, entry: Entry) -> None:
        """End the turn of a request that has reserved workers."""
        name = entry.request.model
        model = self._models[name]
        model.missing = None
        if entry.is_queued:
            now = self._now()
            model.in_turn = None
            model.queue.admitted(entry, now)
            model.rate.admitted(entry.work_tokens, now)
            self._dequeued(model, entry, now)
            # Models that admitted a request go to the end, so that none takes all the capacity.
            self._models[name] = self._models.pop(name)
            self._offer_all()

    def leave(self, entry: Entry, *, is_rejected: bool) -> None:
        """Release the slot of a request, or its place in the queue. A rejected one gets its charge
        back."""
        model, now = self._models[entry.request.model], self._now()
        if is_rejected:
            entry.account.refund(entry.work_tokens, entry.request.sampling.n)
        else:
            entry.account.leave(now - entry.arrived, entry.request.sampling.n)
        if entry.is_queued:
            model.queue.remove(entry)
            self._dequeued(model, entry, now)
        if entry.has_slot:
            self._release_slot(model, entry)
            self.wake_soon()
        else:
            self._offer(model)  # requests behind it may fit

    def _timeout_s(self, model: _Model, entry: Entry, now: float) -> float:
        """Return the seconds until the next check of a queued request. Raises an error if it would
        be late, or if there were no workers for too long."""
        patience_s = self._limits.queue_timeout_s
        missing, since = model.missing, now
        looks_at = now + max(MIN_CHECK_S, patience_s)
        if missing is not None:
            since = max(entry.arrived, model.missing_since)
            looks_at = since + patience_s
        until = min(entry.latest_start, entry.deadline, looks_at)
        if now < until:
            return until - now
        if now >= entry.deadline:
            raise DeadlineExceeded("the deadline passed while the request was queued")
        if now >= entry.latest_start or missing is None:
            raise self._late(model, entry, now - entry.latest_start, now)
        raise Unavailable(
            f"{missing.message}; waited {now - since:.0f} s for a worker",
            retry_after_s=missing.retry_after_s or UNAVAILABLE_RETRY_AFTER_S,
            reason=missing.reason,
        )

    def wake(self) -> None:
        """Offer turns to queued requests. Call when workers or capacity may be free."""
        self._wakes_soon = False
        for model in self._models.values():
            model.queue.unblock(after_scan=model.in_turn is not None)
        self._offer_all()

    def wake_soon(self) -> None:
        """Schedule one `wake` for the next event loop iteration. Many releases in one frame then
        cause a single scan of the queues."""
        if not self._wakes_soon and self.queued:
            self._wakes_soon = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        if self._wakes_soon:
            self.wake()

    def _charged(self, request: GenerateRequest, kv_tokens: int, now: float) -> Entry:
        """Charge a new request to its tenant and return its entry. Raises Overloaded if a limit of
        the tenant is exceeded."""
        prompt_tokens, sampling = len(request.prompt_token_ids), request.sampling
        work_tokens = prompt_tokens + sampling.n * min(sampling.max_tokens, PREDICTED_OUTPUT_TOKENS)
        latest_start, late_reason = self._latest_start(request, now)
        account = self.tenants[request.tenant]
        account.enter(work_tokens, now, sampling.n)
        return Entry(
            request=request,
            account=account,
            arrived=now,
            work_tokens=work_tokens,
            kv_tokens=kv_tokens,
            latest_start=latest_start,
            late_reason=late_reason,
        )

    def _latest_start(self, request: GenerateRequest, now: float) -> tuple[float, Refusal]:
        latest, estimate = math.inf if request.deadline is None else request.deadline, None
        if self._latency is not None:
            estimate = self._latency.estimate(
                request.model, len(request.prompt_token_ids), request.sampling.max_tokens
            )
        if estimate is None:
            return latest, Refusal.DEADLINE_UNREACHABLE
        latest -= sum(estimate)
        limit_s = self._limits.max_ttft_s
        has_slo = request.service_class is ServiceClass.INTERACTIVE and not request.resume
        if limit_s and has_slo:
            # A prompt whose prefill alone exceeds the limit would be rejected at every retry. So it
            # may wait as long as its prefill takes.
            slack_s = max(limit_s - estimate.wait_s - estimate.prefill_s, estimate.prefill_s)
            if now + slack_s < latest:
                return now + slack_s, Refusal.SLO_UNREACHABLE
        return latest, Refusal.DEADLINE_UNREACHABLE

    @property
    def _most_running(self) -> int:
        return self._limits.max_running_requests or max(1, self._slots())

    def _has_slot(self, entry: Entry) -> bool:
        if entry.is_batch and not self._has_batch_slot:
            return False
        return self.running < self._most_running

    @property
    def _has_batch_slot(self) -> bool:
        most = max(1, int(self._most_running * BATCH_SHARE))
        return self._running_batch < most

    def _check_queue(self, model: _Model, entry: Entry, now: float) -> None:
        """Raise an error if the queue is full, or so long that the request would be late."""
        wait_s = model.rate.wait_s(model.queue.work_before(entry), now) or 0.0
        if now + wait_s > entry.latest_start:
            raise self._late(model, entry, now + wait_s - entry.latest_start, now)
        limit = self._limits.max_queued_requests
        share = math.ceil(self.tenants.share(entry.request.tenant) * limit)
        if self.queued < limit and self._queued_of_tenant[entry.request.tenant] < share:
            return
        has_slots = self.running < self._most_running
        retry_after_s = model.rate.retry_after_s(now)
        raise Overloaded(
            f"{self.running} requests are running and {self.queued} are queued"
            f"{' for KV cache space' if has_slots else ''}; retry in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=Refusal.NO_ROOM if has_slots else Refusal.QUEUE_FULL,
        )

    def _late(self, model: _Model, entry: Entry, late_s: float, now: float) -> PdserveError:
        retry_after_s = max(model.rate.retry_after_s(now), float(math.ceil(late_s)))
        kind: type[PdserveError] = Unavailable
        by = f"{late_s:.2f} s" if late_s >= 0.01 else "just"
        told = f"the answer is predicted {by} after its deadline"
        if entry.late_reason is Refusal.SLO_UNREACHABLE:
            kind, told = Overloaded, f"the predicted TTFT is {by} over the limit"
        text = f"{told}; retry in {retry_after_s:.0f} s"
        return kind(text, retry_after_s=retry_after_s, reason=entry.late_reason)

    def _push(self, model: _Model, entry: Entry, now: float) -> None:
        self._check_queue(model, entry, now)
        model.queue.push(entry)
        model.rate.set_backlog(True, now)
        self.queued += 1
        self._queued_of_tenant[entry.request.tenant] += 1

    def _dequeued(self, model: _Model, entry: Entry, now: float) -> None:
        self.queued -= 1
        self._queued_of_tenant[entry.request.tenant] -= 1
        if not len(model.queue):
            model.rate.set_backlog(False, now)

    def _offer_all(self) -> None:
        for model in self._models.values():
            self._offer(model)

    def _offer(self, model: _Model) -> None:
        """Give the next queued request of a model its turn, if there is a slot for it."""
        if model.in_turn is not None or not len(model.queue) or self.running >= self._most_running:
            return
        entry = model.queue.next_turn(with_batch=self._has_batch_slot)
        if entry is not None:
            model.in_turn = entry
            self._give_slot(entry)

    def _give_slot(self, entry: Entry) -> None:
        entry.has_slot = True
        self.running += 1
        self._running_batch += entry.is_batch
        if entry.turn is not None and not entry.turn.done():
            entry.turn.set_result(None)

    def _release_slot(self, model: _Model, entry: Entry) -> None:
        entry.has_slot = False
        self.running -= 1
        self._running_batch -= entry.is_batch
        if model.in_turn is entry:
            model.in_turn = None
