"""Admission: bounds, order, deadlines, and that nothing leaks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import DeadlineExceeded, Overloaded, Unavailable
from router.admission import MAX_RETRY_AFTER_S, Admission, AdmissionLimits, Grant


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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
                model, lambda: self.room.reserve(tokens), deadline=None
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


async def test_a_request_without_room_is_not_overtaken_by_a_smaller_one() -> None:
    requests = queue(capacity=10)
    await requests.ask("a", 6)
    await requests.ask("large", 8)
    await requests.ask("small", 1)
    assert requests.admitted == ["a"]
    await requests.release("a")
    assert requests.admitted == ["a", "large", "small"]
    await requests.release("large")
    await requests.release("small")


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
    await requests.ask("small", 1)
    await requests.cancel("large")
    assert requests.admitted == ["a", "small"]
    await requests.release("a")
    await requests.release("small")


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


async def test_over_the_queue_a_request_is_refused_with_the_default_retry_time() -> None:
    admission = Admission(AdmissionLimits(1, 0, default_retry_after_s=2.5))
    room = Room(10)
    grant = await admission.acquire("demo", lambda: room.reserve(1), deadline=None)
    with pytest.raises(Overloaded, match="1 requests are running and 0 are waiting") as caught:
        await admission.acquire("demo", lambda: room.reserve(1), deadline=None)
    assert caught.value.retry_after_s == 2.5
    grant.release()


async def test_the_retry_time_follows_the_rate_at_which_requests_end() -> None:
    clock = Clock()
    admission = Admission(AdmissionLimits(1, 8), clock=clock)
    room = Room(10)
    for _ in range(11):
        clock.now += 0.5
        grant = await admission.acquire("demo", lambda: room.reserve(1), deadline=None)
        grant.release()
    requests = Queue(admission, room)
    for name in "abcde":
        await requests.ask(name, 1)
    # 11 ends in 5 s and 4 that wait; then nothing ends for 50 s more.
    assert admission.retry_after_s() == pytest.approx(4 / (11 / 5))
    clock.now += 50
    assert admission.retry_after_s() == pytest.approx(4 / (11 / 55))
    clock.now += 1e9
    assert admission.retry_after_s() == MAX_RETRY_AFTER_S
    for name in "abcde":
        await requests.release(name)


@pytest.mark.parametrize("deadline_in_s", [-1.0, 0.01])
async def test_a_deadline_ends_the_wait(deadline_in_s: float) -> None:
    requests = queue(running=1)
    await requests.ask("a", 1)
    with pytest.raises(DeadlineExceeded):
        await requests.admission.acquire(
            "demo", lambda: requests.room.reserve(1), deadline=time.monotonic() + deadline_in_s
        )
    assert requests.admission.queued == 0
    await requests.release("a")


async def test_what_reserving_raises_reaches_the_one_who_asked() -> None:
    requests = queue(running=1)
    await requests.ask("a", 1)

    def refuse() -> Held | None:
        raise Unavailable("the workers left")

    waiting = asyncio.create_task(requests.admission.acquire("demo", refuse, deadline=None))
    await settle()
    await requests.ask("b", 1)
    await requests.release("a")
    with pytest.raises(Unavailable, match="the workers left"):
        await waiting
    assert requests.admitted == ["a", "b"], "the next is admitted all the same"
    await requests.release("b")
    with pytest.raises(Unavailable):
        await requests.admission.acquire("demo", refuse, deadline=None)
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
def test_whatever_happens_bounds_hold_order_is_kept_and_nothing_leaks(
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
            assert requests.admitted == sorted(requests.admitted)
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
