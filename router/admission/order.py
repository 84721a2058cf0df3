"""Who goes next among the requests that wait for one model. No I/O, no clock.

1. Interactive requests go before batch requests; after INTERACTIVE_RUN of them in a row, one batch
   request goes where one waits.
2. Within a class, tenants share by weight: the tenant goes next whose virtual start time is least
   (start-time fair queueing, Goyal, Vin and Cheng 1996, over predicted tokens).
3. Within a tenant, the request goes next that has the lowest (priority, due time, arrival); yet
   each has a latest turn, given when it came, at which it goes whatever else has come since.

Latest turns of one tenant's queue are at least TURN_SPACING apart, so no two fall due together and
three turns in four are always free for rule 3. One that came when n waited goes within
TURN_SLACK + TURN_SPACING * (n + 1) grants of its queue, and its passes (see `scan`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, TypeVar

from pdserve.types import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERACTIVE_RUN = 8
TURN_SLACK = 32
TURN_SPACING = 4
# A request that finds no room is passed by at most so many that do.
MAX_PASSES = 16
# How far one look at a queue goes: requests looked at, and those that placement is asked for.
SCAN_DEPTH = 64
SCAN_TRIES = 4
# Queues are swept of those that left when there are so many more of them than of those that wait.
_SWEEP = 64
# What waits is summed up by due times of so many seconds.
DUE_STEP_S = 1.0 / 16.0


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the queue. `due` is on the caller's clock; `weight` is its tenant's."""

    prompt_tokens: int = 0
    kv_tokens: int = 0
    work_tokens: int = 1
    priority: int = 0
    due: float = 0.0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    weight: float = 1.0
    arrival: int = 0
    latest_turn: int = 0
    passed: int = 0
    gone: bool = False

    def needs_no_less_than(self, other: Waiting) -> bool:
        return self.prompt_tokens >= other.prompt_tokens and self.kv_tokens >= other.kv_tokens


Ranked = tuple[int, float, int, Waiting]
Item = TypeVar("Item")


class TenantQueue:
    """Rule 3. `start` and `finish` are the tenant's virtual times, `work_tokens` what waits."""

    def __init__(self) -> None:
        self.size = 0
        self.work_tokens = 0
        self.weight = 1.0
        self.turn = 0
        self.start = 0.0
        self.finish = 0.0
        self.stamp = 0
        self._last_turn = 0
        self._by_age: deque[Waiting] = deque()
        self._by_rank: list[Ranked] = []
        # By priority and step of the due time: whole queues are not walked for each that comes.
        self._work: dict[tuple[int, float], int] = {}

    def push(self, waiting: Waiting) -> None:
        floor = self.turn + TURN_SLACK
        self._last_turn = max(self._last_turn, floor) if self.size else floor
        self._last_turn += TURN_SPACING
        waiting.latest_turn = self._last_turn
        self.weight = waiting.weight
        self.size += 1
        self._count(waiting, waiting.work_tokens)
        self._by_age.append(waiting)
        heappush(self._by_rank, (waiting.priority, waiting.due, waiting.arrival, waiting))

    def _count(self, waiting: Waiting, tokens: int) -> None:
        self.work_tokens += tokens
        step = (waiting.priority, waiting.due // DUE_STEP_S)
        left = self._work.get(step, 0) + tokens
        if left:
            self._work[step] = left
        else:
            self._work.pop(step, None)

    def work_before(self, priority: int, due: float) -> int:
        """Tokens of those that go before one of this rank."""
        rank = (priority, due // DUE_STEP_S)
        return sum(tokens for step, tokens in self._work.items() if step <= rank)

    def last(self) -> Waiting:
        """The lowest in rank of those that wait; there are some."""
        return max(entry for entry in self._by_rank if not entry[3].gone)[3]

    def first(self) -> Waiting:
        """The next of those that wait; there are some."""
        oldest = self._oldest()
        if oldest.latest_turn <= self.turn + 1:
            return oldest
        ranked = self._by_rank
        while ranked[0][3].gone:
            heappop(ranked)
        return ranked[0][3]

    def in_order(self) -> Iterator[Waiting]:
        """Those that wait, the next one first."""
        first = self.first()
        yield first
        for *_, waiting in _in_order(self._by_rank):
            if not waiting.gone and waiting is not first:
                yield waiting

    def _oldest(self) -> Waiting:
        by_age = self._by_age
        while by_age[0].gone:
            by_age.popleft()
        return by_age[0]

    def remove(self, waiting: Waiting) -> None:
        waiting.gone = True
        self.size -= 1
        self._count(waiting, -waiting.work_tokens)
        if len(self._by_rank) > 2 * self.size + _SWEEP:
            self._by_rank = [entry for entry in self._by_rank if not entry[3].gone]
            heapify(self._by_rank)
        if len(self._by_age) > 2 * self.size + _SWEEP:
            self._by_age = deque(x for x in self._by_age if not x.gone)


class FairQueue:
    """Rule 2. `virtual` is the time up to which everyone has had their share."""

    def __init__(self) -> None:
        self.size = 0
        self.virtual = 0.0
        self._last_finish = 0.0
        self._tenants: dict[str, TenantQueue] = {}
        # By virtual start; entries whose stamp is not their queue's are stale.
        self._heap: list[tuple[float, int, int, TenantQueue]] = []
        self._count = count()

    def push(self, waiting: Waiting) -> None:
        queue = self._tenants.get(waiting.tenant)
        if queue is None:
            queue = self._tenants[waiting.tenant] = TenantQueue()
        if not queue.size:
            # Time in which it asked for nothing is no credit.
            self._enqueue(queue, max(self.virtual, queue.finish))
        queue.push(waiting)
        self.size += 1

    def first(self) -> Waiting:
        """The next of those that wait; there are some."""
        queue = self._first()
        assert queue is not None
        return queue.first()

    def in_order(self) -> Iterator[Waiting]:
        self._first()
        for _, stamp, _, queue in _in_order(self._heap):
            if stamp == queue.stamp:
                yield from queue.in_order()

    def work_before(self, one: Waiting) -> float:
        """Tokens that are granted before `one` if it came now, at the least: those of its tenant
        that go before it, and what the other tenants have meanwhile by their weights."""
        mine = self._tenants.get(one.tenant)
        own = 0 if mine is None else mine.work_before(one.priority, one.due)
        if not own:
            return 0.0
        others = (queue for queue in self._tenants.values() if queue.size and queue is not mine)
        return own + sum(min(q.work_tokens, own * q.weight / one.weight) for q in others)

    def last_of(self, tenant: str) -> Waiting | None:
        queue = self._tenants.get(tenant)
        return queue.last() if queue is not None and queue.size else None

    def granted(self, waiting: Waiting) -> None:
        queue = self._tenants[waiting.tenant]
        first = self._first()
        if first is not None:
            self.virtual = max(self.virtual, first.start)
        queue.finish = queue.start + waiting.work_tokens / waiting.weight
        self._last_finish = max(self._last_finish, queue.finish)
        queue.turn += 1
        self._remove(queue, waiting)
        if queue.size:
            self._enqueue(queue, queue.finish)

    def left(self, waiting: Waiting) -> None:
        self._remove(self._tenants[waiting.tenant], waiting)

    def _remove(self, queue: TenantQueue, waiting: Waiting) -> None:
        queue.remove(waiting)
        self.size -= 1
        if not queue.size:
            queue.stamp += 1
        if not self.size:
            # Nobody waited for what was used before.
            self.virtual = self._last_finish

    def _enqueue(self, queue: TenantQueue, start: float) -> None:
        queue.start = start
        queue.stamp += 1
        heappush(self._heap, (start, queue.stamp, next(self._count), queue))
        if len(self._heap) > 2 * len(self._tenants) + _SWEEP:
            self._heap = [entry for entry in self._heap if entry[1] == entry[3].stamp]
            heapify(self._heap)

    def _first(self) -> TenantQueue | None:
        while self._heap and self._heap[0][1] != self._heap[0][3].stamp:
            heappop(self._heap)
        return self._heap[0][3] if self._heap else None


class ModelQueue:
    """Rule 1, and the state of it all: changed by `push`, `granted` and `left`."""

    def __init__(self) -> None:
        self._interactive = FairQueue()
        self._batch = FairQueue()
        self._run = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return self._interactive.size + self._batch.size

    def push(self, waiting: Waiting) -> None:
        self._arrivals += 1
        waiting.arrival = self._arrivals
        self._of(waiting).push(waiting)

    def granted(self, waiting: Waiting) -> None:
        """It goes: those whose room it did not take move on."""
        self._of(waiting).granted(waiting)
        if waiting.service_class is ServiceClass.BATCH:
            self._run = 0
        elif self._batch.size:
            self._run += 1

    def left(self, waiting: Waiting) -> None:
        """It gave up."""
        self._of(waiting).left(waiting)

    def work_before(self, one: Waiting) -> float:
        """Tokens of its class that are granted before `one` if it came now, at the least."""
        return self._of(one).work_before(one)

    def last_of(self, tenant: str) -> Waiting | None:
        """The one of a tenant that goes last; of its batch requests, where it has any."""
        return self._batch.last_of(tenant) or self._interactive.last_of(tenant)

    def first(self, *, with_batch: bool = True) -> Waiting | None:
        """The next one."""
        for queue in self._classes(with_batch):
            if queue.size:
                return queue.first()
        return None

    def in_order(self, *, with_batch: bool = True) -> Iterator[Waiting]:
        """Those that wait, the next one first."""
        for queue in self._classes(with_batch):
            yield from queue.in_order()

    def _classes(self, with_batch: bool) -> tuple[FairQueue, ...]:
        if not with_batch:
            return (self._interactive,)
        if self._run >= INTERACTIVE_RUN:
            return (self._batch, self._interactive)
        return (self._interactive, self._batch)

    def _of(self, waiting: Waiting) -> FairQueue:
        return self._batch if waiting.service_class is ServiceClass.BATCH else self._interactive


@dataclass(slots=True)
class Scan:
    """What one look at a queue found: who goes, and those that were tried before and had no room.
    Whoever needs no less than one of those needs not be tried until room grows."""

    chosen: Waiting | None
    blocked: list[Waiting]


def scan(
    queue: ModelQueue, has_room: Callable[[Waiting], bool], *, with_batch: bool = True
) -> Scan:
    """The first in order that finds room. Whom it passes has that counted; one that was passed
    MAX_PASSES times is passed no more, so that room comes together for it."""
    first = queue.first(with_batch=with_batch)
    if first is None:
        return Scan(None, [])
    if has_room(first):
        return Scan(first, [])
    blocked = [first]
    if first.passed >= MAX_PASSES:
        return Scan(None, blocked)
    for waiting in islice(queue.in_order(with_batch=with_batch), 1, SCAN_DEPTH):
        if any(waiting.needs_no_less_than(other) for other in blocked):
            continue
        if has_room(waiting):
            for other in blocked:
                other.passed += 1
            return Scan(waiting, blocked)
        blocked.append(waiting)
        if waiting.passed >= MAX_PASSES or len(blocked) == SCAN_TRIES:
            break
    return Scan(None, blocked)


def _in_order(heap: list[Item]) -> Iterator[Item]:
    """The items of a binary heap from the least on, the heap left as it is."""
    if not heap:
        return
    front: list[tuple[Item, int]] = [(heap[0], 0)]
    while front:
        item, i = heappop(front)
        yield item
        for child in (2 * i + 1, 2 * i + 2):
            if child < len(heap):
                heappush(front, (heap[child], child))
