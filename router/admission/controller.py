"""Admission control: bounds running and queued requests, and rejects what cannot be in time.

A request asks for a slot. It gets one at once, waits for one in the queue of its model, or is
rejected with the seconds after which a retry makes sense.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, cast

from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.types import ServiceClass
from router.admission.queue import AdmissionRate, Entry, ModelQueue, Promises, Reservation
from router.admission.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest

# Most answers end before max_tokens: a queued request is predicted to generate at most this many.
PREDICTED_OUTPUT_TOKENS = 256
# Largest part of the running requests that may be of the batch class.
BATCH_SHARE = 0.75
# Requests that one scan of the queue tries to place, beside those that wait for their LoRA adapter.
SCAN_TRIES = 4
SCAN_ADAPTERS = 16
UNAVAILABLE_RETRY_AFTER_S = 5.0
# A queued request looks at least this often whether its model has no workers any more.
MIN_CHECK_S = 0.05
# At most this share of the queue is kept for rejected clients that were told to retry now.
KEPT_SHARE = 0.75


R = TypeVar("R", bound=Reservation)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Without `max_running_requests`, as many run as the engines have slots. Requests wait at most
    `queue_timeout_s` for a missing worker. Interactive requests with a predicted TTFT over
    `max_ttft_s` are rejected; 0 rejects none."""

    max_running_requests: int = 0
    max_queued_requests: int = 1024
    queue_timeout_s: float = 30.0
    max_ttft_s: float = 0.0


class LatencyEstimate(NamedTuple):
    """Predicted times of a request once it is admitted: until its prefill starts, of its prefill,
    and from its first to its last token."""

    wait_s: float
    prefill_s: float
    decode_s: float


class LatencyModel(Protocol):
    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate | None:
        """Return None while too little was measured."""
        ...


class Slot(Generic[R]):
    """A slot of an admitted request. A context of its reservation: leaving it releases both."""

    __slots__ = ("_admission", "_entry", "_reservation")

    def __init__(self, admission: AdmissionController, entry: Entry, reservation: R) -> None:
        self._admission, self._entry, self._reservation = admission, entry, reservation

    def __enter__(self) -> R:
        return self._reservation

    def __exit__(self, *_: object) -> None:
        self._admission.release(self._entry, self._reservation)


@dataclass(slots=True)
class _Model:
    """State of one model. `blocked` are the requests that found no capacity in the last scan;
    `unavailable` is why no request can be placed, since `unavailable_since`."""

    queue: ModelQueue = field(default_factory=ModelQueue)
    rate: AdmissionRate = field(default_factory=AdmissionRate)
    promises: Promises = field(default_factory=Promises)
    blocked: list[Entry] = field(default_factory=list)
    unavailable: Unavailable | None = None
    unavailable_since: float = 0.0


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
        """`slots` returns how many requests the engines run at once (max_num_seqs). `clock` is the
        event loop's by default."""
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

    async def slot(
        self,
        request: GenerateRequest,
        try_reserve: Callable[[], R | None],
        *,
        kv_tokens: int = 0,
        has_adapter_slot: Callable[[], bool] = lambda: True,
    ) -> Slot[R]:
        """Wait for a slot with what `try_reserve` returned.

        `try_reserve` is called when it is the request's turn. It returns None if workers have no
        capacity now, and raises Unavailable if no worker could serve the request; both wait.
        `kv_tokens` is the most KV the request can come to hold. `has_adapter_slot` says whether its
        LoRA adapter can run now.

        Raises Overloaded if the queue or a tenant's limit is full or the SLO cannot be met;
        Unavailable if the deadline cannot be met, or no worker came in `queue_timeout_s`;
        DeadlineExceeded if the deadline passed; and any other error of `try_reserve`.
        """
        now = self._now()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        if self._wakes_soon:
            self._wake()  # requests that are queued already go first
        entry = self._enter(request, try_reserve, kv_tokens, now)
        entry.has_adapter_slot = has_adapter_slot
        model = self._models[request.model]
        try:
            reservation = self._at_once(model, entry, now)
        except BaseException:
            entry.account.refund(entry.work_tokens)
            raise
        if reservation is None:
            reservation = await self._wait(model, entry, now)
        return Slot(self, entry, cast("R", reservation))

    def _at_once(self, model: _Model, entry: Entry, now: float) -> Reservation | None:
        """Admit a new request. Return None if it must queue, and may."""
        if now > entry.latest_start:
            raise self._late(model, entry, now - entry.latest_start, now)
        if not len(model.queue) and self._has_slot(entry):
            reservation = self._try(model, entry, now)
            if reservation is not None:
                self._admitted(entry)
                return reservation
        self._check_queue(model, entry, now)
        return None

    async def _wait(self, model: _Model, entry: Entry, now: float) -> Reservation:
        """Queue a request. Return its reservation once it is admitted."""
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        entry.granted = granted
        self._push(model, entry, now)
        try:
            while not granted.done():
                timeout_s = self._timeout_s(model, entry, self._now())
                await asyncio.wait((granted,), timeout=timeout_s)
        except asyncio.CancelledError:
            if not granted.done():
                entry.account.leave(self._now() - entry.arrived)  # it costs what was asked for
                self._remove(model, entry, self._now())
            elif granted.exception() is None:
                self.release(entry, granted.result())
            raise
        return granted.result()

    def _timeout_s(self, model: _Model, entry: Entry, now: float) -> float:
        """Return for how long a queued request waits before it looks again. Reject it if it is too
        late for it, or if there were no workers for too long."""
        patience_s = self._limits.queue_timeout_s
        missing, since = model.unavailable, now
        looks_at = now + max(MIN_CHECK_S, patience_s)
        if missing is not None:
            since = max(entry.arrived, model.unavailable_since)
            looks_at = since + patience_s
        until = min(entry.latest_start, entry.deadline, looks_at)
        if now < until:
            return until - now
        if now >= entry.deadline:
            late: PdserveError = DeadlineExceeded(
                "the deadline passed while the request was queued"
            )
        elif now >= entry.latest_start or missing is None:
            late = self._late(model, entry, now - entry.latest_start, now)
        else:
            late = Unavailable(
                f"{missing.message}; waited {now - since:.0f} s for a worker",
                retry_after_s=missing.retry_after_s or UNAVAILABLE_RETRY_AFTER_S,
                reason=missing.reason,
            )
        self._reject(model, entry, late, now)
        return 0.0

    def wake(self) -> None:
        """Admit queued requests. Call when workers or capacity may have come; models take turns."""
        self._wakes_soon = False
        waiting = [name for name, model in self._models.items() if len(model.queue)]
        for name in waiting:
            self._models[name].blocked = []
        while waiting:
            waiting = [name for name in waiting if self._advance(self._models[name])]
            for name in waiting:
                self._models[name] = self._models.pop(name)

    def wake_soon(self) -> None:
        """Call `wake` once at the end of this turn of the event loop."""
        if not self._wakes_soon and self.queued:
            self._wakes_soon = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        if self._wakes_soon:
            self.wake()

    def _enter(
        self,
        request: GenerateRequest,
        try_reserve: Callable[[], Reservation | None],
        kv_tokens: int,
        now: float,
    ) -> Entry:
        """Charge a new request to its tenant."""
        prompt_tokens, sampling = len(request.prompt_token_ids), request.sampling
        work_tokens = prompt_tokens + sampling.n * min(sampling.max_tokens, PREDICTED_OUTPUT_TOKENS)
        latest_start, late_reason = self._latest_start(request, now)
        account = self.tenants[request.tenant]
        account.enter(work_tokens, now)
        return Entry(
            request=request,
            account=account,
            arrived=now,
            try_reserve=try_reserve,
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
            # A retry cannot make a long prompt shorter: it may wait as long as its prefill takes.
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
        kept = model.promises.kept_from(entry.identity, now) if model.promises else 0
        share = math.ceil(self.tenants.share(entry.request.tenant) * limit)
        is_full = self.queued + min(kept, int(KEPT_SHARE * limit)) >= limit
        if not is_full and self._queued_of_tenant[entry.request.tenant] < share:
            return
        has_slots = self.running < self._most_running
        retry_after_s = model.promises.make(entry.identity, model.rate.interval_s(now), now)
        raise Overloaded(
            f"{self.running} requests are running and {self.queued} are queued"
            f"{' for KV cache space' if has_slots else ''}; retry in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=Refusal.NO_ROOM if has_slots else Refusal.QUEUE_FULL,
        )

    def _late(self, model: _Model, entry: Entry, late_s: float, now: float) -> PdserveError:
        retry_after_s = model.promises.make(entry.identity, model.rate.interval_s(now), now)
        retry_after_s = max(retry_after_s, float(math.ceil(late_s)))
        kind: type[PdserveError] = Unavailable
        by = f"{late_s:.2f} s" if late_s >= 0.01 else "just"
        told = f"the answer is predicted {by} after its deadline"
        if entry.late_reason is Refusal.SLO_UNREACHABLE:
            kind, told = Overloaded, f"the predicted TTFT is {by} over the limit"
        text = f"{told}; retry in {retry_after_s:.0f} s"
        return kind(text, retry_after_s=retry_after_s, reason=entry.late_reason)

    def _push(self, model: _Model, entry: Entry, now: float) -> None:
        model.queue.push(entry)
        model.rate.set_backlog(True, now)
        self.queued += 1
        self._queued_of_tenant[entry.request.tenant] += 1
        # It may fit where those before it do not.
        if self._has_slot(entry) and not any(map(entry.is_behind, model.blocked)):
            self._advance(model)

    def _reject(self, model: _Model, entry: Entry, error: PdserveError, now: float) -> None:
        """Take a request out of the queue; its waiting task raises `error`."""
        entry.account.refund(entry.work_tokens)
        self._remove(model, entry, now)
        entry.granted.set_exception(error)

    def _remove(self, model: _Model, entry: Entry, now: float) -> None:
        """Take a request that was not admitted out of the queue."""
        model.queue.remove(entry)
        self._dequeued(model, entry, now)
        if entry in model.blocked:
            self.wake_soon()  # those behind it may fit

    def _dequeued(self, model: _Model, entry: Entry, now: float) -> None:
        self.queued -= 1
        self._queued_of_tenant[entry.request.tenant] -= 1
        if not len(model.queue):
            model.rate.set_backlog(False, now)

    def _advance(self, model: _Model) -> bool:
        """Admit or reject at most one queued request. Return False if none could go."""
        now = self._now()
        model.blocked = []
        if self.running >= self._most_running:
            return False
        for entry in model.queue.in_order(with_batch=self._has_batch_slot):
            if any(map(entry.is_behind, model.blocked)):
                continue
            try:
                reservation = self._try(model, entry, now)
            except PdserveError as error:
                self._reject(model, entry, error, now)
                return True
            if reservation is not None:
                for other in model.blocked:
                    other.passed += bool(entry.request.adapter_key or not other.waits_for_adapter)
                model.queue.admitted(entry)
                model.rate.admitted(entry.work_tokens, now)
                self._dequeued(model, entry, now)
                self._admitted(entry)
                entry.granted.set_result(reservation)
                return True
            model.blocked.append(entry)
            waiting = sum(x.waits_for_adapter for x in model.blocked)
            is_over = waiting == SCAN_ADAPTERS or len(model.blocked) - waiting == SCAN_TRIES
            if is_over or (entry.is_passed and not entry.waits_for_adapter):
                break
        return False

    def _try(self, model: _Model, entry: Entry, now: float) -> Reservation | None:
        try:
            reservation = entry.try_reserve()
        except Unavailable as error:
            if model.unavailable is None:
                model.unavailable_since = now
            model.unavailable = error
            return None
        model.unavailable = None
        entry.waits_for_adapter = reservation is None and not entry.has_adapter_slot()
        return reservation

    def _admitted(self, entry: Entry) -> None:
        self.running += 1
        self._running_batch += entry.is_batch

    def release(self, entry: Entry, reservation: Reservation) -> None:
        """Give back the slot of an admitted request."""
        reservation.release()
        self.running -= 1
        self._running_batch -= entry.is_batch
        entry.account.leave(self._now() - entry.arrived)
        self.wake_soon()
