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
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from pdserve.types import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERACTIVE_RUN = 8
RATE_WINDOW = 64
RATE_MIN_SAMPLES = 8

_rank = attrgetter("rank")


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


class _Line(Generic[Q]):
    """A tenant's requests of one class, by rank. `start` and `finish` are its virtual times."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.start = self.finish = 0.0
        self.requests: list[Q] = []


class ModelQueue(Generic[Q]):
    """Queue of one model."""

    def __init__(self) -> None:
        self._size = 0
        self._run = 0  # interactive requests admitted since the last batch request
        self._arrivals = count()
        self._virtual = dict.fromkeys(ServiceClass, 0.0)
        self._lines: dict[ServiceClass, dict[str, _Line[Q]]] = {x: {} for x in ServiceClass}

    def __len__(self) -> int:
        return self._size

    def _waiting(self, service_class: ServiceClass) -> list[_Line[Q]]:
        lines = [line for line in self._lines[service_class].values() if line.requests]
        return sorted(lines, key=attrgetter("start"))

    def push(self, request: Q) -> None:
        request.arrival = next(self._arrivals)
        lines = self._lines[request.service_class]
        line = lines.setdefault(request.tenant, _Line(request.weight))
        if not line.requests:
            # A tenant earns no credit while it has nothing queued.
            line.start = max(self._virtual[request.service_class], line.finish)
        insort(line.requests, request, key=_rank)
        self._size += 1

    def remove(self, request: Q) -> None:
        """Remove a request that gave up or was rejected."""
        lines = self._lines[request.service_class]
        requests = lines[request.tenant].requests
        del requests[bisect_left(requests, request.rank, key=_rank)]
        self._size -= 1
        if not self._waiting(request.service_class):
            self._virtual[request.service_class] = max(line.finish for line in lines.values())

    def admitted(self, request: Q) -> None:
        """Remove a request that was admitted, and charge its tenant."""
        kind, first = request.service_class, self._waiting(request.service_class)[0]
        line = self._lines[kind][request.tenant]
        self._virtual[kind] = max(self._virtual[kind], first.start)
        line.start = line.finish = line.start + request.work_tokens / line.weight
        self.remove(request)
        if kind is ServiceClass.BATCH:
            self._run = 0
        elif self._waiting(ServiceClass.BATCH):
            self._run += 1

    def in_order(self, *, with_batch: bool = True) -> Iterator[Q]:
        classes = [ServiceClass.INTERACTIVE]
        if with_batch:
            classes.insert(0 if self._run >= INTERACTIVE_RUN else 1, ServiceClass.BATCH)
        for service_class in classes:
            for line in self._waiting(service_class):
                yield from line.requests

    def work_before(self, request: Q) -> float:
        """Return the tokens of its class that are admitted before `request` if it came now."""
        mine = self._lines[request.service_class].get(request.tenant)
        if mine is None:
            return 0.0
        position = bisect_left(mine.requests, (request.priority, request.due, 0), key=_rank)
        own = sum(r.work_tokens for r in mine.requests[:position])
        return own + sum(
            min(sum(r.work_tokens for r in line.requests), own * line.weight / mine.weight)
            for line in self._waiting(request.service_class)
            if line is not mine
        )


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
