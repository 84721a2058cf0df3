"""Admission control: bounds running and queued requests, and rejects what cannot be in time.

A request asks for a slot. It gets one at once, waits for one in the queue of its model, or is
rejected with the seconds after which a retry makes sense.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.types import ServiceClass
from router.admission.queue import AdmissionRate, ModelQueue, QueuedRequest
from router.admission.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.types import GenerateRequest
    from router.admission.tenants import TenantUsage

# Most answers end before max_tokens: a queued request is predicted to generate at most this many.
PREDICTED_OUTPUT_TOKENS = 256
# Largest part of the running requests that may be of the batch class.
BATCH_SHARE = 0.75
# A queued request is due this long after its arrival, so that short prompts go first but long ones
# are not starved.
DUE_S_PER_PROMPT_TOKEN = 0.001
# A request that finds no capacity is passed by at most this many smaller ones that do.
MAX_PASSES = 16
# Requests that one scan of the queue tries to place.
SCAN_TRIES = 4
DEFAULT_RETRY_AFTER_S = 1.0  # while no rate was measured
UNAVAILABLE_RETRY_AFTER_S = 5.0
MAX_RETRY_AFTER_S = 600.0
# Places in the queue are kept for rejected clients from a second before until a second after the
# time that they were told, but at most this share of all places.
KEPT_SHARE = 0.75
KEPT_S = 1.0
# Retries get this share of the measured rate, new requests the rest.
RETRY_SHARE = 0.7
MAX_PROMISES = 4096


class Reservation(Protocol):
    """Capacity held by a request. Releasing again does nothing."""

    def release(self) -> None: ...


R = TypeVar("R", bound=Reservation)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Requests wait at most `queue_timeout_s` for a missing worker. Interactive requests with a
    predicted TTFT over `max_ttft_s` are rejected; 0 rejects none."""

    max_running_requests: int = 256
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


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry(QueuedRequest):
    """A request from its arrival until its slot is released. Admitted after `latest_start` it would
    break its deadline or its SLO, which `late_reason` tells apart."""

    model: str
    arrived: float
    deadline: float
    latest_start: float
    late_reason: Refusal
    usage: TenantUsage
    request: GenerateRequest
    try_reserve: Callable[[], Reservation | None]
    granted: asyncio.Future[Reservation]

    @property
    def identity(self) -> int:
        """The same number if a client sends the same request again."""
        request = self.request
        return hash((request.tenant, request.prompt_token_ids, request.sampling.max_tokens))


@dataclass(slots=True)
class _Model:
    """State of one model. `blocked` are the requests that found no capacity in the last scan;
    `unavailable` is why no request can be placed, since `unavailable_since`. `promises` are the
    times at which rejected clients were told to retry, by request, the earliest first."""

    queue: ModelQueue[_Entry] = field(default_factory=ModelQueue)
    rate: AdmissionRate = field(default_factory=AdmissionRate)
    blocked: list[_Entry] = field(default_factory=list)
    next_retry: float = 0.0
    promises: dict[int, float] = field(default_factory=dict)
    unavailable: Unavailable | None = None
    unavailable_since: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def kept_places(self, entry: _Entry, now: float) -> int:
        """Return the places that are kept for others now: none if one is kept for `entry`."""
        for identity, due in list(self.promises.items()):
            if due >= now - KEPT_S:
                break
            del self.promises[identity]
        if not self.promises:
            return 0
        if self.promises.get(entry.identity, math.inf) <= now + KEPT_S:
            del self.promises[entry.identity]
            return 0
        return sum(1 for _ in takewhile(lambda due: due <= now + KEPT_S, self.promises.values()))


class AdmissionController:
    """Admits requests. All methods run in one event loop."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        tenants: Tenants | None = None,
        latency: LatencyModel | None = None,
    ) -> None:
        self.running = 0
        self.queued = 0
        self.tenants = tenants or Tenants()
        self._limits = limits
        self._latency = latency
        self._models: dict[str, _Model] = {}
        self._queued_of_tenant: dict[str, int] = {}
        self._running_batch = 0
        self._wakes_soon = False

    def queued_of(self, model: str) -> int:
        state = self._models.get(model)
        return 0 if state is None else len(state.queue)

    @asynccontextmanager
    async def slot(
        self, request: GenerateRequest, try_reserve: Callable[[], R | None], *, kv_tokens: int = 0
    ) -> AsyncIterator[R]:
        """Wait for a slot and yield what `try_reserve` returned. Leaving releases both.

        `try_reserve` is called when it is the request's turn. It returns None if workers have no
        capacity now, and raises Unavailable if no worker could serve the request; both wait.
        `kv_tokens` is the most KV the request can come to hold.

        Raises Overloaded if the queue or a tenant's limit is full or the SLO cannot be met;
        Unavailable if the deadline cannot be met, or no worker came in `queue_timeout_s`;
        DeadlineExceeded if the deadline passed; and any other error of `try_reserve`.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was admitted")
        if self._wakes_soon:
            self._wake()  # requests that are queued already go first
        entry = self._enter(request, try_reserve, kv_tokens, now)
        reservation = await self._wait(entry, now)
        try:
            yield cast("R", reservation)
        finally:
            self._release(entry, reservation)

    async def _wait(self, entry: _Entry, now: float) -> Reservation:
        """Return the entry's reservation once it is admitted."""
        loop = asyncio.get_running_loop()
        model = self._models.setdefault(entry.model, _Model())
        try:
            if now > entry.latest_start:
                raise self._late(model, entry, now - entry.latest_start, now)
            if not len(model.queue) and self._has_slot(entry):
                reservation = self._try(model, entry, now)
                if reservation is not None:
                    self._admitted(entry)
                    return reservation
            self._check_queue(model, entry, now)
        except BaseException:
            entry.usage.refund()
            raise
        self._push(model, entry, now)
        granted = entry.granted
        try:
            async with asyncio.timeout_at(_finite(min(entry.latest_start, entry.deadline))):
                return await granted
        except TimeoutError:
            if not granted.cancelled():
                return granted.result()  # granted at the same moment
            raise self._expired(model, entry, loop.time()) from None
        except BaseException:
            if granted.cancelled():
                entry.usage.release(loop.time())  # it costs the tenant what was asked for
                self._leave(model, entry, loop.time())
            elif granted.exception() is None:
                self._release(entry, granted.result())  # granted and cancelled at the same moment
            raise

    def wake(self) -> None:
        """Admit queued requests. Call when workers or capacity may have come; models take turns."""
        self._wakes_soon = False
        waiting = [(name, model) for name, model in self._models.items() if len(model.queue)]
        for _, model in waiting:
            model.blocked = []
        while waiting:
            waiting = [(name, model) for name, model in waiting if self._advance(model)]
            for name, _ in waiting:
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
    ) -> _Entry:
        prompt_tokens, sampling = len(request.prompt_token_ids), request.sampling
        work_tokens = prompt_tokens + sampling.n * min(sampling.max_tokens, PREDICTED_OUTPUT_TOKENS)
        latest_start, late_reason = self._latest_start(request, now)
        return _Entry(
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens,
            work_tokens=work_tokens,
            priority=request.priority,
            due=min(now + DUE_S_PER_PROMPT_TOKEN * prompt_tokens, latest_start),
            service_class=request.service_class,
            tenant=request.tenant,
            weight=self.tenants.weight(request.tenant),
            model=request.model,
            arrived=now,
            deadline=math.inf if request.deadline is None else request.deadline,
            latest_start=latest_start,
            late_reason=late_reason,
            usage=self.tenants.enter(request.tenant, work_tokens, now),
            request=request,
            try_reserve=try_reserve,
            granted=asyncio.get_running_loop().create_future(),
        )

    def _latest_start(self, request: GenerateRequest, now: float) -> tuple[float, Refusal]:
        latest = math.inf if request.deadline is None else request.deadline
        estimate = None
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

    def _has_slot(self, entry: _Entry) -> bool:
        return self.running < self._limits.max_running_requests and (
            entry.service_class is not ServiceClass.BATCH or self._has_batch_slot
        )

    @property
    def _has_batch_slot(self) -> bool:
        most = max(1, int(self._limits.max_running_requests * BATCH_SHARE))
        return self._running_batch < most

    def _check_queue(self, model: _Model, entry: _Entry, now: float) -> None:
        """Raise an error if the queue is full, or so long that the request would be late."""
        wait_s = model.rate.wait_s(model.queue.work_before(entry), now) or 0.0
        if now + wait_s > entry.latest_start:
            raise self._late(model, entry, now + wait_s - entry.latest_start, now)
        limit = self._limits.max_queued_requests
        kept = model.kept_places(entry, now)
        share = math.ceil(self.tenants.share(entry.tenant) * limit)
        if (
            self.queued + min(kept, int(KEPT_SHARE * limit)) < limit
            and self._queued_of_tenant.get(entry.tenant, 0) < share
        ):
            return
        has_slots = self.running < self._limits.max_running_requests
        retry_after_s = self._retry_after_s(model, entry, now)
        raise Overloaded(
            f"{self.running} requests are running and {self.queued} are queued"
            f"{' for KV cache space' if has_slots else ''}; retry in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=Refusal.NO_ROOM if has_slots else Refusal.QUEUE_FULL,
        )

    def _retry_after_s(self, model: _Model, entry: _Entry, now: float) -> float:
        """Return when there is a place in the queue for this client after all that were told
        before. The place is kept."""
        interval_s = (model.rate.interval_s(now) or DEFAULT_RETRY_AFTER_S) / RETRY_SHARE
        model.next_retry = max(model.next_retry, now) + interval_s
        model.next_retry = min(model.next_retry, now + MAX_RETRY_AFTER_S)
        wait_s = float(max(1, math.ceil(model.next_retry - now)))
        model.promises.pop(entry.identity, None)
        if len(model.promises) < MAX_PROMISES:
            model.promises[entry.identity] = now + wait_s
        return wait_s

    def _late(self, model: _Model, entry: _Entry, late_s: float, now: float) -> PdserveError:
        retry_after_s = max(self._retry_after_s(model, entry, now), float(math.ceil(late_s)))
        kind: type[PdserveError] = Unavailable
        told = f"the answer is predicted {late_s:.2f} s after its deadline"
        if entry.late_reason is Refusal.SLO_UNREACHABLE:
            kind, told = Overloaded, f"the predicted TTFT is {late_s:.2f} s over the limit"
        return kind(
            f"{told}; retry in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
            reason=entry.late_reason,
        )

    def _push(self, model: _Model, entry: _Entry, now: float) -> None:
        model.queue.push(entry)
        model.rate.set_backlog(True, now)
        self.queued += 1
        self._queued_of_tenant[entry.tenant] = self._queued_of_tenant.get(entry.tenant, 0) + 1
        self._arm(model)
        # It may fit where those before it do not.
        if self._has_slot(entry) and not any(map(entry.needs_at_least, model.blocked)):
            self._advance(model)

    def _leave(self, model: _Model, entry: _Entry, now: float) -> None:
        """Take an entry that was not admitted out of the queue, and refund what it holds."""
        entry.usage.refund()
        model.queue.remove(entry)
        self._dequeued(model, entry, now)
        if entry in model.blocked:
            self.wake_soon()  # those behind it may fit

    def _dequeued(self, model: _Model, entry: _Entry, now: float) -> None:
        self.queued -= 1
        self._queued_of_tenant[entry.tenant] -= 1
        if not len(model.queue):
            model.rate.set_backlog(False, now)

    def _expired(self, model: _Model, entry: _Entry, now: float) -> PdserveError:
        self._leave(model, entry, now)
        if now >= entry.deadline:
            return DeadlineExceeded("the deadline passed while the request was queued")
        return self._late(model, entry, max(0.0, now - entry.latest_start), now)

    def _advance(self, model: _Model) -> bool:
        """Admit or reject at most one queued request. Return False if none could go."""
        now = asyncio.get_running_loop().time()
        model.blocked = []
        if self.running >= self._limits.max_running_requests:
            return False
        for entry in model.queue.in_order(with_batch=self._has_batch_slot):
            if entry.granted.done():
                continue  # it was cancelled, and its task has not run yet
            if any(map(entry.needs_at_least, model.blocked)):
                continue
            try:
                reservation = self._try(model, entry, now)
            except PdserveError as error:
                self._reject(model, entry, error, now)
                return True
            if reservation is not None:
                for other in model.blocked:
                    other.passed += 1
                model.queue.admitted(entry)
                model.rate.admitted(entry.work_tokens, now)
                self._dequeued(model, entry, now)
                self._admitted(entry)
                entry.granted.set_result(reservation)
                return True
            model.blocked.append(entry)
            if entry.passed >= MAX_PASSES or len(model.blocked) == SCAN_TRIES:
                break
        return False

    def _try(self, model: _Model, entry: _Entry, now: float) -> Reservation | None:
        try:
            reservation = entry.try_reserve()
        except Unavailable as error:
            if model.unavailable is None:
                model.unavailable_since = now
            model.unavailable = error
            self._arm(model)
            return None
        model.unavailable = None
        return reservation

    def _arm(self, model: _Model) -> None:
        """Set the timer that rejects requests which waited too long for a missing worker."""
        if model.unavailable is not None and model.timer is None and len(model.queue):
            since = min(max(e.arrived, model.unavailable_since) for e in model.queue.in_order())
            model.timer = asyncio.get_running_loop().call_at(
                since + self._limits.queue_timeout_s, self._reject_unavailable, model
            )

    def _reject_unavailable(self, model: _Model) -> None:
        model.timer = None
        error, now = model.unavailable, asyncio.get_running_loop().time()
        if error is None:
            return
        for entry in list(model.queue.in_order()):
            waited_s = now - max(entry.arrived, model.unavailable_since)
            if waited_s >= self._limits.queue_timeout_s and not entry.granted.done():
                told = Unavailable(
                    f"{error.message}; waited {waited_s:.0f} s for a worker",
                    retry_after_s=error.retry_after_s or UNAVAILABLE_RETRY_AFTER_S,
                    reason=error.reason,
                )
                self._reject(model, entry, told, now)
        self._arm(model)

    def _reject(self, model: _Model, entry: _Entry, error: PdserveError, now: float) -> None:
        self._leave(model, entry, now)
        entry.granted.set_exception(error)

    def _admitted(self, entry: _Entry) -> None:
        self.running += 1
        self._running_batch += entry.service_class is ServiceClass.BATCH

    def _release(self, entry: _Entry, reservation: Reservation) -> None:
        reservation.release()
        self.running -= 1
        self._running_batch -= entry.service_class is ServiceClass.BATCH
        entry.usage.release(asyncio.get_running_loop().time())
        self.wake_soon()


def _finite(time: float) -> float | None:
    return time if math.isfinite(time) else None
