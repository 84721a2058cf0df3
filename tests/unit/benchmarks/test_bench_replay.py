"""The open loop, under a clock that only moves when the replay waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from stepped_clock import SteppedClock

from benchmarks.errors import TargetError
from benchmarks.records import Answer, Timeline
from benchmarks.replay import PlannedRequest, replay, warm_up

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.records import RequestRecord, Status
    from benchmarks.targets import ServedModel


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.sends = 0
        self.ends: list[Status] = []

    def sent(self) -> None:
        self.sends += 1

    def finished(self, status: Status) -> None:
        self.ends.append(status)


class ScriptedTarget:
    """Answers each request by a script of its own."""

    kind = "scripted"
    address = "nowhere"

    def __init__(self, *scripts: Callable[[Timeline], Awaitable[None]]) -> None:
        self._scripts = scripts
        self.cancelled: list[int] = []

    async def model(self, name: str | None) -> ServedModel:
        raise NotImplementedError(name)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> int:
        raise NotImplementedError

    async def send(self, prepared: int, timeline: Timeline) -> None:
        timeline.mark_sent()
        try:
            await self._scripts[prepared](timeline)
        except asyncio.CancelledError:
            self.cancelled.append(prepared)
            raise

    async def aclose(self) -> None:
        return None


def _plan(*due_s: float) -> list[PlannedRequest[int]]:
    return [
        PlannedRequest(
            index=10 + number,
            request_id=f"r{number}",
            due_s=at_s,
            input_tokens=5,
            output_tokens=2,
            prepared=number,
        )
        for number, at_s in enumerate(due_s)
    ]


async def _replay(
    target: ScriptedTarget, clock: SteppedClock, plan: list[PlannedRequest[int]], watcher: Watcher
) -> list[RequestRecord]:
    running = asyncio.create_task(clock.run())
    try:
        return await replay(target, plan, drain_timeout_s=5.0, clock=clock, observer=watcher)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _answer(clock: SteppedClock, *at_s: float) -> Callable[[Timeline], Awaitable[None]]:
    async def script(timeline: Timeline) -> None:
        for moment_s in at_s:
            await clock.sleep_until(moment_s)
            timeline.add_chunk(timeline.now(), 1)
        timeline.complete(Answer(prompt_tokens=5, completion_tokens=2))

    return script


async def _never(timeline: Timeline) -> None:
    timeline.add_chunk(timeline.now(), 1)
    await asyncio.Event().wait()


async def _refused(_timeline: Timeline) -> None:
    raise TargetError("HTTP 503: full")


async def _broken(_timeline: Timeline) -> None:
    raise ZeroDivisionError("a bug")


async def test_requests_go_out_when_due_however_late_the_answers_are() -> None:
    clock = SteppedClock()
    clock.now_s = 100.0
    target = ScriptedTarget(*(_answer(clock, 103.0, 103.5) for _ in range(3)))
    watcher = Watcher()
    records = await _replay(target, clock, _plan(0.0, 1.0, 1.0), watcher)
    assert [record.sent_s for record in records] == [0.0, 1.0, 1.0]
    assert [record.scheduled_s for record in records] == [0.0, 1.0, 1.0]
    assert {record.chunk_s for record in records} == {(3.0, 3.5)}
    assert [record.index for record in records] == [10, 11, 12]
    assert (watcher.sends, watcher.ends) == (3, ["ok"] * 3)


async def test_what_has_not_ended_after_the_drain_is_cancelled_and_timed_out() -> None:
    clock = SteppedClock()
    target = ScriptedTarget(_never, _answer(clock, 6.5, 6.75), _answer(clock, 7.25, 8.0))
    watcher = Watcher()
    records = await _replay(target, clock, _plan(0.0, 1.0, 2.0), watcher)
    assert [record.status for record in records] == ["timed_out", "ok", "timed_out"]
    assert records[0].chunk_s == (0.0,)
    assert records[0].error == "no end before the drain timeout"
    assert target.cancelled == [0, 2]
    assert sorted(watcher.ends) == ["ok", "timed_out", "timed_out"]


async def test_a_failed_request_does_not_stop_the_others() -> None:
    clock = SteppedClock()
    target = ScriptedTarget(_refused, _answer(clock, 1.5, 2.0))
    first, second = await _replay(target, clock, _plan(0.0, 1.0), Watcher())
    assert (first.status, first.error, first.chunk_s) == ("failed", "HTTP 503: full", ())
    assert second.status == "ok"


async def test_a_bug_in_a_target_is_not_a_failed_request() -> None:
    clock = SteppedClock()
    target = ScriptedTarget(_broken, _answer(clock, 1.5, 2.0))
    with pytest.raises(ZeroDivisionError):
        await _replay(target, clock, _plan(0.0, 1.0), Watcher())


async def test_cancelling_a_replay_cancels_its_requests() -> None:
    clock = SteppedClock()
    target = ScriptedTarget(_never, _never)
    begun = asyncio.Event()

    class Begun(Watcher):
        def sent(self) -> None:
            super().sent()
            if self.sends == 2:
                begun.set()

    run = asyncio.create_task(
        replay(target, _plan(0.0, 1.0), drain_timeout_s=5.0, clock=clock, observer=Begun())
    )
    moving = asyncio.create_task(clock.run())
    await begun.wait()
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert target.cancelled == [0, 1]


async def test_a_late_client_is_seen_in_the_lag() -> None:
    clock = SteppedClock()

    async def hog(timeline: Timeline) -> None:
        clock.now_s += 4.0
        await _answer(clock, 5.0, 5.0)(timeline)

    target = ScriptedTarget(hog, _answer(clock, 6.0, 6.0))
    _, late = await _replay(target, clock, _plan(0.0, 1.0), Watcher())
    assert (late.scheduled_s, late.sent_s) == (1.0, 4.0)


async def test_warming_up_stops_at_the_first_failure() -> None:
    clock = SteppedClock()

    async def at_once(timeline: Timeline) -> None:
        timeline.add_chunk(timeline.now(), 2)
        timeline.complete(Answer(prompt_tokens=5, completion_tokens=2))

    target = ScriptedTarget(at_once, _refused, at_once)
    records = await warm_up(target, _plan(0.0, 0.0, 0.0), timeout_s=60.0, clock=clock)
    assert [record.status for record in records] == ["ok", "failed"]


async def test_warming_up_does_not_wait_for_ever() -> None:
    target = ScriptedTarget(_never)
    (record,) = await warm_up(target, _plan(0.0), timeout_s=0.001, clock=SteppedClock())
    assert (record.status, record.error) == ("failed", "no end within 0.001 s")
