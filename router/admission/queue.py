"""Order in which the queued requests of one model are admitted, and how fast. No I/O, no clock.

The first request in order gets a turn to reserve workers. A request that finds no capacity is
blocked, and a smaller one behind it gets the next turn.

1. Interactive requests go before batch requests. After INTERACTIVE_RUN interactive requests in a
   row, one batch request goes first.
2. Within a class, tenants share by weight: start-time fair queueing over predicted tokens (Goyal,
   Vin and Cheng, 1996).
3. Within a tenant, the request with the lowest (priority, due time, arrival) goes first.
4. Only one request per session competes. Its successor competes as if it had arrived when that one
   was admitted. An agent that sends fifty requests at once is therefore served as often as an agent
   that waits for each answer, and naming a session, or a new one per request, gains nothing. A
   request without a session counts as its own session.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.errors import Refusal, Unavailable
from pdserve.types import ServiceClass

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from pdserve.types import GenerateRequest
    from router.admission.tenants import Tenant

INTERACTIVE_RUN = 8
# At most this many later requests are admitted before a request that finds no capacity.
MAX_PASSES = 16
# No further request gets a turn after this many are blocked, because each turn runs the placement
# policy. Requests that wait for a slot of their LoRA adapter count separately, because they block
# only requests for that adapter.
MAX_BLOCKED = 4
MAX_BLOCKED_BY_ADAPTER = 16
RATE_WINDOW = 64
RATE_MIN_SAMPLES = 8
DEFAULT_RETRY_AFTER_S = 1.0  # until a rate was measured
MAX_RETRY_AFTER_S = 600.0
# A queued request is due this long after its arrival, so that short prompts go first but long ones
# are not starved.
DUE_S_PER_PROMPT_TOKEN = 0.001

_rank = attrgetter("rank")


class NoRoom(Unavailable):
    """The workers have no capacity for a request now, but will have."""


class NoAdapterSlot(NoRoom):
    """All adapter slots (max_loras) of the workers run other LoRA adapters."""


class Entry(Struct, eq=False, kw_only=True):
    """A request from its arrival until its slot is released.

    `work_tokens`: predicted tokens to compute. `kv_tokens`: largest KV it may hold, in tokens.
    `passed`: number of later requests admitted before it. `waits_for_adapter`: it found no slot for
    its LoRA adapter. A request admitted after `latest_start` misses its deadline or its SLO;
    `late_reason` is the error. `has_slot`: it has its turn, or runs. `turn` completes when its turn
    begins.
    """

    request: GenerateRequest
    account: Tenant
    arrived: float
    work_tokens: int = 1
    kv_tokens: int = 0
    latest_start: float = math.inf
    late_reason: Refusal = Refusal.DEADLINE_UNREACHABLE
    passed: int = 0
    waits_for_adapter: bool = False
    is_queued: bool = False
    has_slot: bool = False
    turn: asyncio.Future[None] | None = None
    rank: tuple[int, float, int] = (0, 0.0, 0)

    def rank_at(self, arrival: int, since: float | None = None) -> tuple[int, float, int]:
        """Return the order within a tenant. Short prompts are due sooner. `since`: overrides the
        arrival time."""
        begins = self.arrived if since is None else since
        due = begins + DUE_S_PER_PROMPT_TOKEN * self.prompt_tokens
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

    def is_behind(self, other: Entry) -> bool:
        """Return True if this request cannot, or must not, be placed while `other` waits."""
        # A smaller request may fit where `other` does not, so it need not wait behind it.
        if other.waits_for_adapter:
            adapter = self.request.adapter_key
            return adapter == other.request.adapter_key or bool(adapter and other.is_passed)
        return self.prompt_tokens >= other.prompt_tokens and self.kv_tokens >= other.kv_tokens

    @property
    def is_passed(self) -> bool:
        """True if no more later requests may be admitted before this one."""
        return self.passed >= MAX_PASSES


@dataclass(slots=True)
class _Line:
    """Queued requests of one tenant and class. Requests behind others of their session are last.
    `start`: virtual start time of the first request. `first`: the first request of each session, in
    order of rank. `heads`: the same by session id. `behind`: the other requests of a session, in
    order of rank.
    """

    weight: float
    start: float = 0.0
    first: list[Entry] = field(default_factory=list)
    heads: dict[str, Entry] = field(default_factory=dict)
    behind: dict[str, list[Entry]] = field(default_factory=dict)
    work_tokens: int = 0  # of all
    _first_tokens: int = 0

    def __iter__(self) -> Iterator[Entry]:
        yield from self.first
        for entries in self.behind.values():
            yield from entries

    def add(self, entry: Entry) -> None:
        self.work_tokens += entry.work_tokens
        session = entry.request.session
        head = self.heads.get(session)
        if head is not None:
            first, second = sorted((head, entry), key=_rank)
            insort(self.behind.setdefault(session, []), second, key=_rank)
            if first is head:
                return
            self._drop_first(head)
        if session:
            self.heads[session] = entry
        self._add_first(entry)

    def remove(self, entry: Entry, admitted_at: float | None = None) -> None:
        """Remove a request that gave up or was admitted."""
        self.work_tokens -= entry.work_tokens
        session = entry.request.session
        queued = self.behind.get(session, [])
        if self.heads.get(session, entry) is not entry:
            self._drop(queued, entry)
        else:
            self._drop_first(entry)
            self.heads.pop(session, None)
            if queued:
                head = self.heads[session] = queued.pop(0)
                if admitted_at is not None:
                    head.rank = head.rank_at(head.rank[-1], admitted_at)
                self._add_first(head)
        if not queued:
            self.behind.pop(session, None)

    def _add_first(self, entry: Entry) -> None:
        insort(self.first, entry, key=_rank)
        self._first_tokens += entry.work_tokens

    def _drop_first(self, entry: Entry) -> None:
        self._drop(self.first, entry)
        self._first_tokens -= entry.work_tokens

    @staticmethod
    def _drop(entries: list[Entry], entry: Entry) -> None:
        del entries[bisect_left(entries, entry.rank, key=_rank)]

    def work_before(self, entry: Entry) -> int:
        """Return the work ahead of `entry`, in tokens."""
        session = entry.request.session
        if session not in self.heads:
            position = bisect_left(self.first, entry.rank_at(-1), key=_rank)
            # Most requests are added last, so few are summed.
            return self._first_tokens - sum(x.work_tokens for x in self.first[position:])
        # Before `entry`, each other session has as many turns as this one.
        turns = 1 + len(self.behind.get(session, ()))
        others = (x for queued in self.behind.values() for x in queued[:turns])
        return self._first_tokens + sum(x.work_tokens for x in others)


class ModelQueue:
    """Queued requests of one model, by class and tenant. `_blocked`: requests that found no
    capacity since the last `unblock`. `_is_scanned`: no other request gets a turn until the next
    `unblock`, unless `_scans_again`."""

    def __init__(self) -> None:
        self._size = 0
        self._blocked: list[Entry] = []
        self._is_scanned = False
        self._scans_again = False
        self._run = 0  # interactive requests admitted since the last batch request
        self._arrivals = count()
        self._virtual = dict.fromkeys(ServiceClass, 0.0)
        self._lines: dict[ServiceClass, dict[str, _Line]] = {x: {} for x in ServiceClass}

    def __len__(self) -> int:
        return self._size

    def _waiting(self, service_class: ServiceClass) -> list[_Line]:
        lines = [line for line in self._lines[service_class].values() if line.first]
        return sorted(lines, key=attrgetter("start"))

    def push(self, entry: Entry) -> None:
        entry.rank = entry.rank_at(next(self._arrivals))
        request, lines = entry.request, self._lines[entry.request.service_class]
        line = lines.setdefault(request.tenant, _Line(entry.account.weight))
        if not line.first:
            # A tenant earns no credit while it has nothing queued.
            line.start = max(self._virtual[request.service_class], line.start)
        line.add(entry)
        entry.is_queued = True
        self._size += 1
        # It may fit although the requests before it do not.
        self._is_scanned &= any(map(entry.is_behind, self._blocked))

    def remove(self, entry: Entry, admitted_at: float | None = None) -> None:
        """Remove a request that gave up, was rejected, or was admitted at `admitted_at`."""
        if entry in self._blocked:
            # Requests behind it may fit.
            self._blocked.remove(entry)
            self._is_scanned = False
        kind, lines = entry.request.service_class, self._lines[entry.request.service_class]
        lines[entry.request.tenant].remove(entry, admitted_at)
        entry.is_queued = False
        self._size -= 1
        if not any(line.first for line in lines.values()):
            self._virtual[kind] = max(line.start for line in lines.values())

    def admitted(self, entry: Entry, now: float) -> None:
        """Remove a request that was admitted, and charge its tenant."""
        for other in takewhile(lambda x: x is not entry, self.in_order()):
            # A request without an adapter takes no adapter slot, so it may pass requests that wait
            # for one any number of times.
            if other in self._blocked:
                other.passed += bool(entry.request.adapter_key or not other.waits_for_adapter)
        kind = entry.request.service_class
        self._virtual[kind] = max(self._virtual[kind], self._waiting(kind)[0].start)
        line = self._lines[kind][entry.request.tenant]
        line.start += entry.work_tokens / line.weight
        self.remove(entry, now)
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
                yield from line

    def next_turn(self, *, with_batch: bool = True) -> Entry | None:
        """Return the first request that may fit. Return None if all are blocked or behind a blocked
        one, or enough are blocked."""
        if self._is_scanned:
            return None
        entry = self._scan(with_batch=with_batch)
        if entry is None and self._scans_again:
            self.unblock()
            entry = self._scan(with_batch=with_batch)
        self._is_scanned = entry is None
        return entry

    def _scan(self, *, with_batch: bool) -> Entry | None:
        blocked: list[Entry] = []
        for entry in self.in_order(with_batch=with_batch):
            if entry in self._blocked:
                blocked.append(entry)
                by_adapter = sum(x.waits_for_adapter for x in blocked)
                others = len(blocked) - by_adapter
                if by_adapter == MAX_BLOCKED_BY_ADAPTER or others == MAX_BLOCKED:
                    break
                if entry.is_passed and not entry.waits_for_adapter:
                    break
            elif not any(map(entry.is_behind, blocked)):
                return entry
        return None

    def block(self, entry: Entry) -> None:
        """Record that a queued request found no capacity in its turn."""
        self._blocked.append(entry)

    def unblock(self, *, after_scan: bool = False) -> None:
        """Let blocked requests have a turn again, because capacity may have become available.
        `after_scan`: only once the current scan has reached the end of the queue."""
        self._scans_again = after_scan
        if not after_scan:
            self._blocked, self._is_scanned = [], False

    def interactive_work(self) -> int:
        """Return the work of the queued interactive requests, in tokens."""
        return sum(x.work_tokens for x in self._lines[ServiceClass.INTERACTIVE].values())

    def work_before(self, entry: Entry) -> float:
        """Return the work ahead of `entry` in its class, in tokens, if it were queued now."""
        mine = self._lines[entry.request.service_class].get(entry.request.tenant)
        if mine is None:
            return 0.0
        own = mine.work_before(entry)
        others = [x for x in self._waiting(entry.request.service_class) if x is not mine]
        return own + sum(min(x.work_tokens, own * x.weight / mine.weight) for x in others)


class AdmissionRate:
    """Rate at which queued requests are admitted, over about the last RATE_WINDOW. Only time with a
    backlog counts: admissions without a backlog do not show how fast the workers could be."""

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = self._mean_tokens = 0.0
        self._since: float | None = None  # time of the last admission, or start of the backlog
        self._last_retry = 0.0

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
        """Return the mean time between two admissions, None after too few. It grows while nothing
        is admitted, slowly, because workers admit in bursts, one per step."""
        if self._count < RATE_MIN_SAMPLES:
            return None
        since_last_s = 0.0 if self._since is None else now - self._since
        longer_s = max(0.0, since_last_s - self._mean_s) / (self._count + 1)
        return max(self._mean_s + longer_s, 1e-6)

    def wait_s(self, work_tokens: float, now: float) -> float | None:
        """Return the time to admit `work_tokens`, None after too few admissions."""
        interval_s = self.interval_s(now)
        return None if interval_s is None else work_tokens / self._mean_tokens * interval_s

    def retry_after_s(self, now: float) -> float:
        """Return the Retry-After of one more rejected request, in whole seconds. It is one interval
        after the retry of the previously rejected request, so that they do not all retry at
        once."""
        interval_s = self.interval_s(now) or DEFAULT_RETRY_AFTER_S
        self._last_retry = min(max(self._last_retry, now) + interval_s, now + MAX_RETRY_AFTER_S)
        return float(max(1, math.ceil(self._last_retry - now)))
