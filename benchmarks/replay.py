"""Open-loop replay: every request is sent when it is due, however late the answers are.

A closed loop that waits for answers before it sends hides a stall, because what would have been
sent in it never is (Tene's "coordinated omission"). So the schedule here is absolute, and latency
is also counted from the time a request was due.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol

from benchmarks.errors import TargetError
from benchmarks.records import Timeline
from benchmarks.targets import PreparedT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.records import RequestRecord, Status
    from benchmarks.targets import Target


class Clock(Protocol):
    """A monotonic clock, and the only way the replay waits."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep_until(self, when_s: float) -> None:
        """Return at ``when_s`` or, if that has passed, after other tasks had a turn."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of ``time.perf_counter``."""
        return time.perf_counter()

    async def sleep_until(self, when_s: float) -> None:
        """Sleep to ``when_s``; a timer that fires early is slept again."""
        await asyncio.sleep(0)
        while (left_s := when_s - time.perf_counter()) > 0:  # noqa: ASYNC110 - time is the event
            await asyncio.sleep(left_s)


class Observer(Protocol):
    """Is told how a replay goes on, between requests."""

    def sent(self) -> None:
        """A request went out."""
        ...

    def finished(self, status: Status) -> None:
        """A request ended."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedRequest(Generic[PreparedT]):
    """A request ready to go, due ``due_s`` after the start. ``index`` is its row in the trace."""

    index: int
    request_id: str
    due_s: float
    input_tokens: int
    output_tokens: int
    prepared: PreparedT


async def replay(
    target: Target[PreparedT],
    plan: Sequence[PlannedRequest[PreparedT]],
    *,
    drain_timeout_s: float,
    clock: Clock,
    observer: Observer,
) -> list[RequestRecord]:
    """Send each request of ``plan`` (in the order of their due times) when it is due.

    Waits at most ``drain_timeout_s`` after the last one is due; what has not ended by then is
    cancelled and recorded as timed out. Returns a record for every request, in the plan's order.
    """
    start_s = clock.now()

    def now() -> float:
        return clock.now() - start_s

    timelines: list[Timeline] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        for planned in plan:
            await clock.sleep_until(start_s + planned.due_s)
            timeline = _timeline(planned, now)
            timelines.append(timeline)
            tasks.append(asyncio.create_task(_send(target, planned, timeline, observer)))
            observer.sent()
        await _drain(tasks, clock, start_s + plan[-1].due_s + drain_timeout_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return [timeline.record() for timeline in timelines]


async def warm_up(
    target: Target[PreparedT],
    plan: Sequence[PlannedRequest[PreparedT]],
    *,
    timeout_s: float,
    clock: Clock,
) -> list[RequestRecord]:
    """Send requests one after the other, before anything is measured.

    Stops at the first that does not end well within ``timeout_s``; its record is the last.
    """
    records: list[RequestRecord] = []
    for planned in plan:
        timeline = _timeline(planned, clock.now)
        try:
            async with asyncio.timeout(timeout_s):
                await target.send(planned.prepared, timeline)
        except TargetError as error:
            timeline.fail(str(error))
        except TimeoutError:
            timeline.fail(f"no end within {timeout_s:g} s")
        records.append(timeline.record())
        if timeline.status != "ok":
            break
    return records


def _timeline(planned: PlannedRequest[PreparedT], now: Callable[[], float]) -> Timeline:
    return Timeline(
        index=planned.index,
        request_id=planned.request_id,
        input_tokens=planned.input_tokens,
        output_tokens=planned.output_tokens,
        scheduled_s=planned.due_s,
        now=now,
    )


async def _send(
    target: Target[PreparedT],
    planned: PlannedRequest[PreparedT],
    timeline: Timeline,
    observer: Observer,
) -> None:
    try:
        await target.send(planned.prepared, timeline)
    except TargetError as error:
        timeline.fail(str(error))
    finally:
        observer.finished(timeline.status)


async def _drain(tasks: Sequence[asyncio.Task[None]], clock: Clock, deadline_s: float) -> None:
    """Return when all tasks have ended, or at ``deadline_s``."""
    deadline = asyncio.create_task(clock.sleep_until(deadline_s))
    ended = asyncio.create_task(asyncio.wait(tasks))
    try:
        await asyncio.wait({deadline, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (deadline, ended):
            task.cancel()
        await asyncio.gather(deadline, ended, return_exceptions=True)
