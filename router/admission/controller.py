"""Admission control: bounds running and queued requests, and rejects requests that would be late.

A request gets its turn at once, waits for it in the queue of its model, or is rejected with a
Retry-After. In its turn it reserves workers, or reports why it cannot and queues again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.types import ServiceClass
from router.admission.queue import AdmissionRate, Entry, ModelQueue, NoAdapterSlot, NoRoom
from router.admission.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from pdserve.config import QueueConfig
    from pdserve.types import GenerateRequest, Regions

# Cap of the predicted length of an answer: most answers end before max_tokens.
PREDICTED_OUTPUT_TOKENS = 256
# Largest share of running requests in the batch class. The rest stays free, so that an interactive
# request does not wait for a batch answer to end.
BATCH_SHARE = 0.75
# Retry-After if no worker is ready and none is known to be starting.
UNAVAILABLE_RETRY_AFTER_S = 5.0
# Longest interval between two checks of a queued request that its model still has workers.
MIN_CHECK_S = 0.05


class LatencyEstimate(NamedTuple):
    """Predicted times of a request after admission: wait until prefill starts, prefill, and decode
    from the first to the last token."""

    wait_s: float
    prefill_s: float
    decode_s: float


class LatencyModel(Protocol):
    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Predict the times of a request. Return None while there are too few measurements."""
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
        worker was ready within the queue's timeout; DeadlineExceeded if the deadline has passed.
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
    could serve the request that had the last turn, and since when, by where requests may be."""

    queue: ModelQueue = field(default_factory=ModelQueue)
    rate: AdmissionRate = field(default_factory=AdmissionRate)
    in_turn: Entry | None = None
    missing: dict[Regions, tuple[Unavailable, float]] = field(default_factory=dict)


class AdmissionController:
    """Admits requests. All methods run in one event loop."""

    def __init__(
        self,
        queue: QueueConfig,
        *,
        max_ttft_s: float = 0.0,
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
        self._queue, self._max_ttft_s = queue, max_ttft_s
        self._latency, self._slots = latency, slots
        self._now = clock or asyncio.get_running_loop().time
        self._models = defaultdict[str, _Model](_Model)
        self._queued_of_tenant = Counter[str]()
        self._running_batch = 0
        self._wakes_soon = False

    def queued_of(self, model: str) -> int:
        state = self._models.get(model)
        return 0 if state is None else len(state.queue)

    def queue_wait_s(self, model: str) -> float:
        """Return the predicted wait in the queue of a new interactive request."""
        state = self._models.get(model)
        if state is None or not len(state.queue):
            return 0.0
        return state.rate.wait_s(state.queue.interactive_work(), self._now()) or 0.0

    @contextmanager
    def elsewhere(self, request: GenerateRequest) -> Iterator[None]:
        """Charge the tenant for a request that another region serves. One that is not served costs
        nothing. Raises Overloaded, naming the exceeded limit."""
        began, n = self._now(), request.sampling.n
        entry = self._charged(request, 0, began)
        try:
            yield
        except PdserveError:
            entry.account.refund(entry.work_tokens, n)
            raise
        except BaseException:
            entry.account.leave(self._now() - began, n)
            raise
        entry.account.leave(self._now() - began, n)

    def use_max_ttft(self, seconds: float) -> None:
        """Change `max_ttft_s` of the limits."""
        self._max_ttft_s = seconds

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
            self._wake()  # queued requests take released capacity before this one
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
        """End the turn of a request that got no workers; `reason` says why."""
        model, now = self._models[entry.request.model], self._now()
        regions = entry.request.regions
        self._release_slot(model, entry)
        if isinstance(reason, NoRoom):
            model.missing.pop(regions, None)
            entry.waits_for_adapter = isinstance(reason, NoAdapterSlot)
        else:
            _, since = model.missing.get(regions, (reason, now))
            # A copy: its traceback would keep the request.
            model.missing[regions] = (copy(reason), since)
        if not entry.is_queued:
            self._push(model, entry, now)
        model.queue.block(entry)
        self._offer_all()

    def admit(self, entry: Entry) -> None:
        """End the turn of a request that has reserved workers."""
        name = entry.request.model
        model = self._models[name]
        model.missing.pop(entry.request.regions, None)
        if entry.is_queued:
            now = self._now()
            model.in_turn = None
            model.queue.admitted(entry, now)
            model.rate.admitted(entry.work_tokens, now)
            self._dequeued(model, entry, now)
            # Models that admitted a request go to the end, so that no model takes all the capacity.
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
        """Return the seconds until the next check of a queued request. Raises its `late_reason` if
        it is late, and Unavailable if no worker was ready for the queue's timeout."""
        patience_s = self._queue.timeout_s
        looks_at = now + max(MIN_CHECK_S, patience_s)
        missing, since = model.missing.get(entry.request.regions, (None, now))
        if missing is not None:
            since = max(entry.arrived, since)
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
        """Offer turns to queued requests. Call when workers or capacity may have become
        available."""
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
        limit_s = self._max_ttft_s
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
        return self._queue.max_running_requests or max(1, self._slots())

    def _has_slot(self, entry: Entry) -> bool:
        if entry.is_batch and not self._has_batch_slot:
            return False
        return self.running < self._most_running

    @property
    def _has_batch_slot(self) -> bool:
        most = max(1, int(self._most_running * BATCH_SHARE))
        return self._running_batch < most

    def _check_queue(self, model: _Model, entry: Entry, now: float) -> None:
        """Raise Overloaded if the queue is full, or the `late_reason` of a request that would be
        late."""
        wait_s = model.rate.wait_s(model.queue.work_before(entry), now) or 0.0
        if now + wait_s > entry.latest_start:
            raise self._late(model, entry, now + wait_s - entry.latest_start, now)
        limit = self._queue.max_queued_requests
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
        late = f"the answer is predicted {by} after its deadline"
        if entry.late_reason is Refusal.SLO_UNREACHABLE:
            kind, late = Overloaded, f"the predicted TTFT is {by} over the limit"
        text = f"{late}; retry in {retry_after_s:.0f} s"
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
