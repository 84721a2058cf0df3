"""Admission: bounds, order, deadlines, and that nothing leaks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import DeadlineExceeded, Overloaded, Unavailable
from router.admission import Admission, AdmissionLimits, Bid, Grant
from router.admission.order import MAX_PASSES


@dataclass
class Room:
    """Tokens that reservations share."""

    capacity: int
    taken: int = 0
    most: int = 0

    def reserve(self, tokens: int) -> Held | None:
        if self.taken + tokens > self.capacity:
            return None
        self.taken += tokens
        self.most = max(self.most, self.taken)
        return Held(self, tokens)


@dataclass
class Held:
    room: Room
    tokens: int

    def release(self) -> None:
        self.room.taken -= self.tokens
        self.tokens = 0


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Queue:
    """Requests by name, and the order in which they were admitted."""

    def __init__(self, admission: Admission, room: Room) -> None:
        self.admission = admission
        self.room = room
        self.admitted: list[str] = []
        self.grants: dict[str, Grant[Held]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, tokens: int, *, model: str = "demo") -> None:
        async def run() -> None:
            self.grants[name] = await self.admission.acquire(
                bid(tokens, model), lambda: self.room.reserve(tokens)
            )
            self.admitted.append(name)

        self.tasks[name] = asyncio.create_task(run())
        await settle()

    async def release(self, name: str) -> None:
        self.grants.pop(name).release()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settle()


def bid(tokens: int = 1, model: str = "demo", **changes: Any) -> Bid:
    """Requests that came together are in order of arrival, whatever their size."""
    return Bid(model, kv_tokens=tokens, **changes)


def queue(*, running: int = 8, queued: int = 8, capacity: int = 100) -> Queue:
    return Queue(Admission(AdmissionLimits(running, queued)), Room(capacity))


async def test_requests_over_the_bound_wait_and_are_admitted_in_order() -> None:
    requests = queue(running=2)
    for name in "abcd":
        await requests.ask(name, 1)
    assert requests.admitted == ["a", "b"]
    assert (requests.admission.running, requests.admission.queued) == (2, 2)
    await requests.release("b")
    assert requests.admitted == ["a", "b", "c"]
    await requests.release("a")
    await requests.release("c")
    await requests.release("d")
    assert requests.admitted == ["a", "b", "c", "d"]
    assert (requests.admission.running, requests.admission.queued, requests.room.taken) == (0, 0, 0)


async def test_smaller_ones_pass_a_request_without_room_for_a_while() -> None:
    requests = queue(capacity=10)
    await requests.ask("a", 6)
    await requests.ask("large", 8)
    small = [f"small-{i}" for i in range(MAX_PASSES)]
    for name in small:
        await requests.ask(name, 1)
        assert requests.admitted[-1] == name, "at once: it needs less than what waits"
        await requests.release(name)
    await requests.ask("late", 1)
    assert requests.admitted == ["a", *small], "no more may pass"
    await requests.release("a")
    assert requests.admitted == ["a", *small, "large", "late"]
    await requests.release("large")
    await requests.release("late")


async def test_a_model_without_room_does_not_hold_up_another() -> None:
    requests = queue(capacity=10)
    await requests.ask("a", 10)
    await requests.ask("b", 10)
    await requests.ask("c", 0, model="other")
    assert requests.admitted == ["a", "c"]
    for name in ("a", "b", "c"):
        await requests.release(name)


async def test_a_request_that_leaves_the_queue_lets_those_behind_it_pass() -> None:
    requests = queue(capacity=10)
    await requests.ask("a", 6)
    await requests.ask("large", 8)
    await requests.ask("as large", 8)
    requests.room.capacity = 14
    await requests.cancel("large")
    assert requests.admitted == ["a", "as large"]
    await requests.release("a")
    await requests.release("as large")


async def test_a_grant_in_the_breath_of_a_cancellation_is_given_back() -> None:
    requests = queue(running=1)
    await requests.ask("a", 5)
    await requests.ask("b", 5)
    await requests.ask("c", 5)
    # Granted, but its task has not run when it is cancelled.
    requests.grants.pop("a").release()
    await requests.cancel("b")
    assert requests.admitted == ["a", "c"]
    assert requests.room.taken == 5
    await requests.release("c")
    assert (requests.admission.running, requests.room.taken) == (0, 0)


async def test_releasing_twice_frees_one_seat() -> None:
    requests = queue(running=1)
    await requests.ask("a", 1)
    grant = requests.grants["a"]
    grant.release()
    grant.release()
    assert requests.admission.running == 0


async def test_many_cancellations_in_one_breath_give_back_all() -> None:
    requests = queue(running=1, queued=2000, capacity=5000)
    await requests.ask("a", 1)
    for i in range(1500):
        requests.tasks[f"{i}"] = asyncio.create_task(
            requests.admission.acquire(bid(), lambda: requests.room.reserve(1))  # type: ignore[arg-type]
        )
    await settle()
    for i in range(1500):
        requests.tasks[f"{i}"].cancel()
    requests.grants.pop("a").release()
    await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
    assert (requests.admission.running, requests.admission.queued, requests.room.taken) == (0, 0, 0)


@pytest.mark.parametrize(
    ("running", "capacity", "reason"), [(1, 10, "queue_full"), (9, 1, "no_room")]
)
async def test_over_the_queue_a_request_is_refused_with_the_reason(
    running: int, capacity: int, reason: str
) -> None:
    admission = Admission(AdmissionLimits(running, 0, default_retry_after_s=2.0))
    room = Room(capacity)
    grant = await admission.acquire(bid(), lambda: room.reserve(1))
    with pytest.raises(Overloaded, match="1 requests are running and 0 are waiting") as caught:
        await admission.acquire(bid(), lambda: room.reserve(1))
    assert caught.value.reason == reason
    assert caught.value.retry_after_s == 3.0, "the default and a margin, in whole seconds"
    grant.release()


@pytest.mark.parametrize("deadline_in_s", [-1.0, 0.01])
async def test_a_deadline_ends_the_wait(deadline_in_s: float) -> None:
    requests = queue(running=1)
    await requests.ask("a", 1)
    with pytest.raises(DeadlineExceeded):
        await requests.admission.acquire(
            bid(deadline=time.monotonic() + deadline_in_s), lambda: requests.room.reserve(1)
        )
    assert requests.admission.queued == 0
    await requests.release("a")


async def test_a_first_token_that_would_be_late_ends_the_wait() -> None:
    admission = Admission(AdmissionLimits(1, 8, ttft_s=0.05))
    for tokens in range(1, 9):
        admission.drain.prefilled("demo", tokens, tokens / 1e5)
    room = Room(10)
    grant = await admission.acquire(bid(), lambda: room.reserve(1))
    with pytest.raises(Overloaded, match="later than is promised") as caught:
        await admission.acquire(bid(prompt_tokens=5, has_slo=True), lambda: room.reserve(1))
    assert caught.value.reason == "slo_unreachable"
    assert caught.value.retry_after_s >= 1.0
    assert (admission.running, admission.queued, room.taken) == (1, 0, 1)
    grant.release()


async def test_what_reserving_raises_reaches_the_one_who_asked() -> None:
    requests = queue(running=1)
    await requests.ask("a", 1)

    def refuse() -> Held | None:
        raise Unavailable("the workers left")

    waiting = asyncio.create_task(requests.admission.acquire(bid(), refuse))
    await settle()
    await requests.ask("b", 1)
    await requests.release("a")
    with pytest.raises(Unavailable, match="the workers left"):
        await waiting
    assert requests.admitted == ["a", "b"], "the next is admitted all the same"
    await requests.release("b")
    with pytest.raises(Unavailable):
        await requests.admission.acquire(bid(), refuse)
    assert requests.admission.running == 0


async def test_waking_tries_again_when_room_grew() -> None:
    requests = queue(capacity=5)
    await requests.ask("a", 8)
    assert requests.admitted == []
    requests.room.capacity = 8
    requests.admission.wake()
    await settle()
    assert requests.admitted == ["a"]
    await requests.release("a")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 10)),
        st.tuples(st.just("release"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_whatever_happens_bounds_hold_and_nothing_leaks(
    steps: list[tuple[str, int]],
) -> None:
    async def play() -> None:
        requests = queue(running=3, queued=4, capacity=12)
        count, cancelled = 0, set[str]()
        for what, value in steps:
            if what == "ask":
                count += 1
                await requests.ask(f"{count:03}", value)
            elif what == "release" and requests.grants:
                await requests.release(sorted(requests.grants)[value % len(requests.grants)])
            elif what == "cancel":
                waiting = sorted(name for name, task in requests.tasks.items() if not task.done())
                if waiting:
                    cancelled.add(waiting[value % len(waiting)])
                    await requests.cancel(waiting[value % len(waiting)])
            assert requests.admission.running <= 3
            assert requests.admission.queued <= 4
            assert requests.room.most <= 12
            assert requests.admission.running == len(requests.grants)
        while requests.grants:
            await requests.release(min(requests.grants))
        assert (requests.admission.running, requests.admission.queued) == (0, 0)
        assert requests.room.taken == 0
        refused = {
            name
            for name, task in requests.tasks.items()
            if not task.cancelled() and isinstance(task.exception(), Overloaded)
        }
        assert set(requests.admitted) | refused | cancelled == set(requests.tasks)

    asyncio.run(play())


async def test_those_that_end_together_make_room_with_one_look_at_the_queue() -> None:
    room, tried = Room(3), 0
    admission = Admission(AdmissionLimits())

    def reserve() -> Held | None:
        nonlocal tried
        tried += 1
        return room.reserve(1)

    async def ask() -> Grant[Held]:
        return await admission.acquire(bid(1, "demo"), reserve)

    first = [await ask() for _ in range(3)]
    tasks = [asyncio.create_task(ask()) for _ in range(6)]
    await settle()
    tried = 0
    for grant in first:
        grant.release()
    await settle()
    assert tried == 4  # three that have room now, and the one behind them that has none
    assert sum(task.done() for task in tasks) == 3
    for task in tasks:
        (await task).release()
    assert admission.running == admission.queued == room.taken == 0
