"""Order in which the queued requests of one model are admitted, and how fast. No I/O, no clock.

1. Interactive requests go before batch requests. After INTERACTIVE_RUN interactive requests in a
   row, one batch request goes first.
2. Within a class, tenants share by weight: start-time fair queueing over predicted tokens (Goyal,
   Vin and Cheng, 1996).
3. Within a tenant, the request with the lowest (priority, due time, arrival) goes first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import Refusal
from pdserve.types import ServiceClass

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from pdserve.types import GenerateRequest
    from router.admission.tenants import Tenant

INTERACTIVE_RUN = 8
# A request that finds no capacity is passed by at most this many that do.
MAX_PASSES = 16
RATE_WINDOW = 64
RATE_MIN_SAMPLES = 8
DEFAULT_RETRY_AFTER_S = 1.0  # while no rate was measured
MAX_RETRY_AFTER_S = 600.0
# Retries get this share of the measured rate, new requests the rest.
RETRY_SHARE = 0.7
# A place in the queue is kept for a rejected client from a second before until a second after the
# time that it was told.
KEPT_S = 1.0
MAX_PROMISES = 4096
# A queued request is due this long after its arrival, so that short prompts go first but long ones
# are not starved.
DUE_S_PER_PROMPT_TOKEN = 0.001

_rank = attrgetter("rank")


class Reservation(Protocol):
    """Capacity held by a request. Releasing again does nothing."""

    def release(self) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A request from its arrival until its slot is released.

    `work_tokens` are the tokens it is predicted to compute, `kv_tokens` the most it can come to
    hold, `passed` how many requests took before it what it waits for although it was their turn
    later. `waits_for_adapter`: it found no slot for its LoRA adapter, which others do not need.
    Admitted after `latest_start` it would break its deadline or its SLO, which `late_reason` tells
    apart.
    """

    request: GenerateRequest
    account: Tenant
    arrived: float
    try_reserve: Callable[[], Reservation | None]
    granted: asyncio.Future[Reservation] = field(init=False)  # once it is queued
    work_tokens: int = 1
    kv_tokens: int = 0
    latest_start: float = math.inf
    late_reason: Refusal = Refusal.DEADLINE_UNREACHABLE
    passed: int = 0
    waits_for_adapter: bool = False
    has_adapter_slot: Callable[[], bool] = lambda: True
    rank: tuple[int, float, int] = (0, 0.0, 0)

    def rank_at(self, arrival: int) -> tuple[int, float, int]:
        """Return the order within a tenant. Short prompts are due sooner."""
        due = self.arrived + DUE_S_PER_PROMPT_TOKEN * self.prompt_tokens
        return self.request.priority, min(due, self.latest_start), arrival

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def deadline(self) -> float:
        return math.inf if self.request.deadline is None else self.request.deadline

    @property
    def is_batch(self) -> bool:
        return self.request.service_class is ServiceClass.BATCH

    @property
    def identity(self) -> int:
        """The same number if a client sends the same request again."""
        request = self.request
        return hash((request.tenant, request.prompt_token_ids, request.sampling.max_tokens))

    def is_behind(self, other: Entry) -> bool:
        """Return True if it cannot or must not be placed while `other` cannot be."""
        if other.waits_for_adapter:
            adapter = self.request.adapter_key
            return adapter == other.request.adapter_key or bool(adapter and other.is_passed)
        return self.prompt_tokens >= other.prompt_tokens and self.kv_tokens >= other.kv_tokens

    @property
    def is_passed(self) -> bool:
        """True if no other may take any more what it waits for."""
        return self.passed >= MAX_PASSES


@dataclass(slots=True)
class _Line:
    """A tenant's requests of one class, by rank. The first one starts at the virtual time
    `start`."""

    weight: float
    start: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    @property
    def work_tokens(self) -> int:
        return sum(entry.work_tokens for entry in self.entries)


class ModelQueue:
    """Queue of one model."""

    def __init__(self) -> None:
        self._size = 0
        self._run = 0  # interactive requests admitted since the last batch request
        self._arrivals = count()
        self._virtual = dict.fromkeys(ServiceClass, 0.0)
        self._lines: dict[ServiceClass, dict[str, _Line]] = {x: {} for x in ServiceClass}

    def __len__(self) -> int:
        return self._size

    def _waiting(self, service_class: ServiceClass) -> list[_Line]:
        lines = [line for line in self._lines[service_class].values() if line.entries]
        return sorted(lines, key=attrgetter("start"))

    def push(self, entry: Entry) -> None:
        entry.rank = entry.rank_at(next(self._arrivals))
        request, lines = entry.request, self._lines[entry.request.service_class]
        line = lines.setdefault(request.tenant, _Line(entry.account.weight))
        if not line.entries:
            # A tenant earns no credit while it has nothing queued.
            line.start = max(self._virtual[request.service_class], line.start)
        insort(line.entries, entry, key=_rank)
        self._size += 1

    def remove(self, entry: Entry) -> None:
        """Remove a request that gave up or was rejected."""
        kind, lines = entry.request.service_class, self._lines[entry.request.service_class]
        entries = lines[entry.request.tenant].entries
        del entries[bisect_left(entries, entry.rank, key=_rank)]
        self._size -= 1
        if not any(line.entries for line in lines.values()):
            self._virtual[kind] = max(line.start for line in lines.values())

    def admitted(self, entry: Entry) -> None:
        """Remove a request that was admitted, and charge its tenant."""
        kind = entry.request.service_class
        self._virtual[kind] = max(self._virtual[kind], self._waiting(kind)[0].start)
        line = self._lines[kind][entry.request.tenant]
        line.start += entry.work_tokens / line.weight
        self.remove(entry)
        if entry.is_batch:
            self._run = 0
        elif self._waiting(ServiceClass.BATCH):
            self._run += 1

    def in_order(self, *, with_batch: bool = True) -> Iterator[Entry]:
        classes = [ServiceClass.INTERACTIVE]
        if with_batch:
            classes.insert(0 if self._run >= INTERACTIVE_RUN else 1, ServiceClass.BATCH)
        for service_class in classes:
            for line in self._waiting(service_class):
                yield from line.entries

    def work_before(self, entry: Entry) -> float:
        """Return the tokens of its class that are admitted before `entry` if it came now."""
        mine = self._lines[entry.request.service_class].get(entry.request.tenant)
        if mine is None:
            return 0.0
        position = bisect_left(mine.entries, entry.rank_at(-1), key=_rank)
        own = sum(x.work_tokens for x in mine.entries[:position])
        others = [x for x in self._waiting(entry.request.service_class) if x is not mine]
        return own + sum(min(x.work_tokens, own * x.weight / mine.weight) for x in others)


class AdmissionRate:
    """Rate at which queued requests are admitted, over about the last RATE_WINDOW. Only time with a
    backlog counts: admissions without a backlog do not show how fast the workers could be."""

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = self._mean_tokens = 0.0
        self._since: float | None = None  # of the last admission, or of the backlog

    def set_backlog(self, has_backlog: bool, now: float) -> None:
        if not has_backlog:
            self._since = None
        elif self._since is None:
            self._since = now

    def admitted(self, work_tokens: int, now: float) -> None:
        self._count = min(RATE_WINDOW, self._count + 1)
        passed_s = 0.0 if self._since is None else now - self._since
        self._mean_s += (passed_s - self._mean_s) / self._count
        self._mean_tokens += (work_tokens - self._mean_tokens) / self._count
        self._since = now

    def interval_s(self, now: float) -> float | None:
        """Return the mean time between two admissions, None if too few were seen. It grows while
        nothing is admitted, slowly: workers admit in bursts, with a step between two."""
        if self._count < RATE_MIN_SAMPLES:
            return None
        since_last_s = 0.0 if self._since is None else now - self._since
        longer_s = max(0.0, since_last_s - self._mean_s) / (self._count + 1)
        return max(self._mean_s + longer_s, 1e-6)

    def wait_s(self, work_tokens: float, now: float) -> float | None:
        """Return the time to admit `work_tokens`, None if too few admissions were seen."""
        interval_s = self.interval_s(now)
        return None if interval_s is None else work_tokens / self._mean_tokens * interval_s


class Promises:
    """Times at which rejected clients were told to retry, by request, the earliest first."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._last = 0.0

    def make(self, request: int, interval_s: float | None, now: float) -> float:
        """Return the seconds after which there is a place in the queue for this client after all
        that were told before. The place is kept."""
        interval_s = (interval_s or DEFAULT_RETRY_AFTER_S) / RETRY_SHARE
        self._last = min(max(self._last, now) + interval_s, now + MAX_RETRY_AFTER_S)
        wait_s = float(max(1, math.ceil(self._last - now)))
        self._due.pop(request, None)
        if len(self._due) < MAX_PROMISES:
            self._due[request] = now + wait_s
        return wait_s

    def kept_from(self, request: int, now: float) -> int:
        """Return the places that are kept for others now: none if one is kept for `request`, which
        uses it up."""
        for other, due in list(self._due.items()):
            if due >= now - KEPT_S:
                break
            del self._due[other]
        if self._due.get(request, math.inf) <= now + KEPT_S:
            del self._due[request]
            return 0
        return sum(1 for _ in takewhile(lambda due: due <= now + KEPT_S, self._due.values()))

    def __bool__(self) -> bool:
        return bool(self._due)
