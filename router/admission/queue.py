"""Order in which the queued requests of one model are admitted. No I/O, no clock.

1. Interactive requests go before batch requests. After INTERACTIVE_RUN interactive requests in a
   row, one batch request goes first.
2. Within a class, tenants share by weight: start-time fair queueing over predicted tokens (Goyal,
   Vin and Cheng, 1996).
3. Within a tenant, the request with the lowest (priority, due time, arrival) goes first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from pdserve.types import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERACTIVE_RUN = 8
RATE_WINDOW = 64
RATE_MIN_SAMPLES = 8


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """A request in the queue. `due` is a time, `work_tokens` the tokens it is predicted to compute,
    `passed` how many requests were admitted before it although it was their turn later."""

    prompt_tokens: int = 0
    kv_tokens: int = 0
    work_tokens: int = 1
    priority: int = 0
    due: float = 0.0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    weight: float = 1.0
    passed: int = 0
    arrival: int = -1

    @property
    def rank(self) -> tuple[int, float, int]:
        return self.priority, self.due, self.arrival

    def needs_at_least(self, other: QueuedRequest) -> bool:
        return self.prompt_tokens >= other.prompt_tokens and self.kv_tokens >= other.kv_tokens


Q = TypeVar("Q", bound=QueuedRequest)


class _TenantQueue(Generic[Q]):
    """`start` and `finish` are the tenant's virtual times."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.start = 0.0
        self.finish = 0.0
        self.requests: list[Q] = []  # by rank


class _FairQueue(Generic[Q]):
    """Rules 2 and 3, for one class."""

    def __init__(self) -> None:
        self.size = 0
        self._virtual = 0.0
        self._tenants: dict[str, _TenantQueue[Q]] = {}

    def push(self, request: Q) -> None:
        queue = self._tenants.get(request.tenant)
        if queue is None:
            queue = self._tenants[request.tenant] = _TenantQueue(request.weight)
        if not queue.requests:
            # A tenant earns no credit while it has nothing queued.
            queue.start = max(self._virtual, queue.finish)
        insort(queue.requests, request, key=_rank)
        self.size += 1

    def remove(self, request: Q) -> None:
        requests = self._tenants[request.tenant].requests
        del requests[bisect_left(requests, request.rank, key=_rank)]
        self.size -= 1
        if not self.size:
            self._virtual = max(queue.finish for queue in self._tenants.values())

    def admitted(self, request: Q) -> None:
        queue = self._tenants[request.tenant]
        self._virtual = max(self._virtual, min(q.start for q in self._waiting()))
        queue.finish = queue.start + request.work_tokens / queue.weight
        queue.start = queue.finish
        self.remove(request)

    def in_order(self) -> Iterator[Q]:
        for queue in sorted(self._waiting(), key=lambda q: q.start):
            yield from queue.requests

    def work_before(self, request: Q) -> float:
        """Return the tokens that are admitted before `request` if it came now."""
        mine = self._tenants.get(request.tenant)
        if mine is None:
            return 0.0
        position = bisect_left(mine.requests, (request.priority, request.due, 0), key=_rank)
        own = sum(r.work_tokens for r in mine.requests[:position])
        others = sum(
            min(sum(r.work_tokens for r in queue.requests), own * queue.weight / mine.weight)
            for queue in self._waiting()
            if queue is not mine
        )
        return own + others

    def _waiting(self) -> list[_TenantQueue[Q]]:
        return [queue for queue in self._tenants.values() if queue.requests]


class ModelQueue(Generic[Q]):
    """Queue of one model."""

    def __init__(self) -> None:
        self._interactive = _FairQueue[Q]()
        self._batch = _FairQueue[Q]()
        self._run = 0  # interactive requests admitted since the last batch request
        self._arrivals = count()

    def __len__(self) -> int:
        return self._interactive.size + self._batch.size

    def push(self, request: Q) -> None:
        request.arrival = next(self._arrivals)
        self._of(request).push(request)

    def remove(self, request: Q) -> None:
        """Remove a request that gave up or was rejected."""
        self._of(request).remove(request)

    def admitted(self, request: Q) -> None:
        """Remove a request that was admitted, and charge its tenant."""
        self._of(request).admitted(request)
        if request.service_class is ServiceClass.BATCH:
            self._run = 0
        elif self._batch.size:
            self._run += 1

    def in_order(self, *, with_batch: bool = True) -> Iterator[Q]:
        classes = [self._interactive]
        if with_batch:
            classes.insert(0 if self._run >= INTERACTIVE_RUN else 1, self._batch)
        for queue in classes:
            yield from queue.in_order()

    def work_before(self, request: Q) -> float:
        """Return the tokens of its class that are admitted before `request` if it came now."""
        return self._of(request).work_before(request)

    def _of(self, request: Q) -> _FairQueue[Q]:
        return self._batch if request.service_class is ServiceClass.BATCH else self._interactive


class AdmissionRate:
    """Rate at which queued requests are admitted. Only time with a backlog counts: admissions
    without a backlog do not show how fast the workers could be."""

    def __init__(self) -> None:
        self._admissions: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._busy_s = 0.0
        self._backlog_since: float | None = None

    def set_backlog(self, has_backlog: bool, now: float) -> None:
        if has_backlog and self._backlog_since is None:
            self._backlog_since = now
        elif not has_backlog:
            self._busy_s = self._busy(now)
            self._backlog_since = None

    def admitted(self, work_tokens: int, now: float) -> None:
        self._admissions.append((self._busy(now), work_tokens))

    def interval_s(self, now: float) -> float | None:
        """Return the mean time between two admissions, None if too few were seen."""
        window_s = self._window(now)
        return None if window_s is None else window_s / (len(self._admissions) - 1)

    def wait_s(self, work_tokens: float, now: float) -> float | None:
        """Return the time to admit `work_tokens`, None if too few admissions were seen."""
        window_s = self._window(now)
        if window_s is None:
            return None
        done = sum(tokens for _, tokens in self._admissions) - self._admissions[0][1]
        return work_tokens * window_s / max(1, done)

    def _busy(self, now: float) -> float:
        since = self._backlog_since
        return self._busy_s + (0.0 if since is None else max(0.0, now - since))

    def _window(self, now: float) -> float | None:
        if len(self._admissions) < RATE_MIN_SAMPLES:
            return None
        return max(self._busy(now) - self._admissions[0][0], 1e-6)


def _rank(request: QueuedRequest) -> tuple[int, float, int]:
    return request.rank
