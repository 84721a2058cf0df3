"""Admission: bounds, waiting, rejections with Retry-After, and that nothing leaks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import QueueConfig, TenantConfig
from pdserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    Refusal,
    Unavailable,
)
from pdserve.types import GenerateRequest, SamplingParams, ServiceClass
from router.admission import (
    AdmissionController,
    LatencyEstimate,
    NoRoom,
    Slot,
    Tenants,
)
from router.admission.queue import MAX_PASSES, RATE_MIN_SAMPLES
from tests.support.timeouts import skip

BATCH = ServiceClass.BATCH
NO_WORKER = Unavailable("no decode worker is ready")


@dataclass
class Held:
    pool: Pool
    tokens: int

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.pool.taken -= self.tokens


class Pool:
    """Capacity that reservations share; `error` is raised instead."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.taken = 0
        self.error: PdserveError | None = None

    def reserve(self, tokens: int) -> Held:
        if self.error is not None:
            raise type(self.error)(self.error.message)
        if self.taken + tokens > self.capacity:
            raise NoRoom("the pool has no room")
        self.taken += tokens
        return Held(self, tokens)


class Clients:
    """Requests by name, in the order in which they were admitted."""

    def __init__(
        self,
        running: int = 8,
        queued: int = 8,
        timeout_s: float = 30.0,
        *,
        capacity: int = 100,
        **options: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.controller = AdmissionController(
            QueueConfig(
                max_running_requests=running, max_queued_requests=queued, timeout_s=timeout_s
            ),
            clock=lambda: loop.time(),  # noqa: PLW0108 - `skip` replaces it
            **options,
        )
        self.pool = Pool(capacity)
        self.admitted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, tokens: int = 1, **changes: Any) -> None:
        values: dict[str, Any] = {
            "request_id": name,
            "model": "demo",
            "prompt_token_ids": (1,) * changes.pop("prompt", 1),
            "sampling": SamplingParams(max_tokens=4),
        }
        request, end = GenerateRequest(**(values | changes)), asyncio.Event()

        async def run() -> None:
            with (
                self.controller.enter(request, kv_tokens=tokens) as slot,
                await self.reserve(slot, tokens),
            ):
                self.admitted.append(name)
                await end.wait()

        self._ends[name], self.tasks[name] = end, asyncio.create_task(run())
        await settle()

    async def reserve(self, slot: Slot, tokens: int) -> Held:
        while True:
            await slot.turn()
            try:
                held = self.pool.reserve(tokens)
            except Unavailable as reason:
                slot.wait_for(reason)
            else:
                slot.take()
                return held

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    def error(self, name: str) -> BaseException | None:
        return self.tasks[name].exception()

    async def end_all(self) -> None:
        for name in list(self.tasks):
            await self.end(name)
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.controller.running, self.controller.queued, self.pool.taken) == (0, 0, 0)
        assert self.controller.queued_of("demo") == 0


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def rejection(clients: Clients, name: str) -> PdserveError:
    error = clients.error(name)
    assert isinstance(error, PdserveError)
    return error


async def test_without_a_limit_as_many_run_as_engines_have_slots() -> None:
    slots = 2
    clients = Clients(0, 8, slots=lambda: slots)
    for name in "abc":
        await clients.ask(name)
    assert clients.admitted == ["a", "b"]
    slots = 3  # a worker came
    clients.controller.wake()
    await asyncio.sleep(0)
    assert clients.controller.running == 3
    await clients.end_all()


async def test_requests_over_the_bound_wait_and_are_admitted_in_order() -> None:
    clients = Clients(2, 8)
    for name in "abcd":
        await clients.ask(name)
    assert clients.admitted == ["a", "b"]
    assert (clients.controller.running, clients.controller.queued) == (2, 2)
    await clients.end("b")
    assert clients.admitted == ["a", "b", "c"]
    await clients.ask("urgent", priority=-1)
    await clients.end("a")
    assert clients.admitted[-1] == "urgent"
    await clients.end_all()


async def test_short_prompts_go_first_but_long_ones_are_not_starved() -> None:
    clients = Clients(1, 8)
    await clients.ask("a")
    await clients.ask("long", prompt=2000)
    await clients.ask("short", prompt=10)
    await clients.end("a")
    assert clients.admitted == ["a", "short"]
    skip(10.0)
    await clients.ask("late", prompt=10)
    await clients.end("short")
    assert clients.admitted[-1] == "long"
    await clients.end_all()


async def test_batch_requests_leave_slots_for_interactive_ones() -> None:
    clients = Clients(4, 8)
    for i in range(4):
        await clients.ask(f"batch-{i}", service_class=BATCH)
    await clients.ask("interactive")
    assert clients.admitted == ["batch-0", "batch-1", "batch-2", "interactive"]
    await clients.end("interactive")
    assert clients.controller.queued == 1
    await clients.end("batch-0")
    assert clients.admitted[-1] == "batch-3"
    await clients.end_all()


async def test_small_requests_pass_a_large_one_for_a_while() -> None:
    clients = Clients(8, 8, capacity=10)
    await clients.ask("a", 6)
    await clients.ask("large", 8)
    for i in range(MAX_PASSES):
        await clients.ask(f"small-{i}")
        assert clients.admitted[-1] == f"small-{i}"
        await clients.end(f"small-{i}")
    await clients.ask("late")
    assert clients.admitted[-1] == f"small-{MAX_PASSES - 1}"
    await clients.end("a")
    assert clients.admitted[-2:] == ["large", "late"]
    await clients.end_all()


async def test_a_request_cancelled_in_its_turn_gives_it_to_the_next() -> None:
    clients = Clients(1, 8)
    for name in "abc":
        await clients.ask(name)
    clients.tasks["a"].cancel()
    await asyncio.wait([clients.tasks["a"]])
    clients.controller.wake()
    assert (clients.controller.running, clients.admitted) == (1, ["a"]), "b has its turn"
    await clients.cancel("b")
    assert clients.admitted == ["a", "c"]
    await clients.end_all()


async def test_a_full_queue_rejects_with_the_time_at_which_there_will_be_a_place() -> None:
    clients = Clients(1, 2)
    await clients.ask("a")
    last = "a"
    for i in range(RATE_MIN_SAMPLES + 1):  # one request every 3 s
        await clients.ask(f"r{i}")
        skip(3.0)
        await clients.end(last)
        last = f"r{i}"
    await clients.ask("b")
    await clients.ask("c")
    told = []
    for name in ("x", "y", "z"):
        await clients.ask(name)
        error = rejection(clients, name)
        assert isinstance(error, Overloaded)
        assert error.reason == Refusal.QUEUE_FULL
        told.append(error.retry_after_s)
    assert told == pytest.approx([3, 6, 9], abs=1), "each the next place, at that rate"
    await clients.end_all()


async def test_a_tenant_cannot_fill_the_queue_of_the_others() -> None:
    tenants = Tenants([TenantConfig(name="a"), TenantConfig(name="b", weight=3.0)])
    clients = Clients(1, 4, tenants=tenants)
    await clients.ask("running", tenant="a")
    await clients.ask("a1", tenant="a")
    await clients.ask("a2", tenant="a")
    assert rejection(clients, "a2").reason == Refusal.QUEUE_FULL
    for i in range(3):
        await clients.ask(f"b{i}", tenant="b")
    assert clients.controller.queued == 4
    await clients.end_all()
    assert (tenants.concurrent("a"), tenants.concurrent("b")) == (0, 0)


async def test_requests_wait_for_a_missing_worker_and_then_fail() -> None:
    clients = Clients(8, 8, 30.0)
    clients.pool.error = NO_WORKER
    await clients.ask("a")
    skip(20.0)
    await clients.ask("b")
    assert clients.controller.queued == 2
    skip(11.0)
    await asyncio.sleep(0.01)
    error = rejection(clients, "a")
    assert isinstance(error, Unavailable)
    assert error.message.startswith(NO_WORKER.message)
    assert error.retry_after_s > 0
    clients.pool.error = None
    clients.controller.wake()
    await settle()
    assert clients.admitted == ["b"]
    await clients.end_all()


async def test_errors_of_the_reservation_are_raised_whether_it_waited_or_not() -> None:
    clients = Clients(8, 8, capacity=1)
    await clients.ask("a")
    await clients.ask("b")
    clients.pool.error = ContextLengthExceeded("too long")
    await clients.end("a")
    await clients.ask("c")
    for name in "bc":
        assert isinstance(rejection(clients, name), ContextLengthExceeded)
    await clients.end_all()


class Latency:
    def __init__(self, *estimate: float) -> None:
        self._estimate = LatencyEstimate(*estimate)

    def estimate(self, model: str, prompt_tokens: int, max_tokens: int) -> LatencyEstimate:
        return self._estimate


async def test_deadlines() -> None:
    clients = Clients(1, 8, latency=Latency(1.0, 1.0, 3.0))
    now = asyncio.get_running_loop().time()
    await clients.ask("running")
    await clients.ask("over", deadline=now - 1.0)
    assert isinstance(rejection(clients, "over"), DeadlineExceeded)
    await clients.ask("unreachable", deadline=now + 4.0)
    error = rejection(clients, "unreachable")
    assert isinstance(error, Unavailable)
    assert error.reason == Refusal.DEADLINE_UNREACHABLE
    await clients.ask("queued", deadline=now + 10.0)
    skip(6.0)
    await asyncio.sleep(0.01)
    assert rejection(clients, "queued").reason == Refusal.DEADLINE_UNREACHABLE
    await clients.end_all()


async def test_a_deadline_without_measurements_is_kept_in_the_queue() -> None:
    clients = Clients(1, 8)
    await clients.ask("running")
    await clients.ask("queued", deadline=asyncio.get_running_loop().time() + 10.0)
    skip(11.0)
    await asyncio.sleep(0.01)
    assert isinstance(rejection(clients, "queued"), DeadlineExceeded)
    await clients.end_all()


@pytest.mark.parametrize(("limit_s", "waits_s"), [(5.0, 3.0), (1.0, 1.5)])
async def test_interactive_requests_that_would_miss_the_slo_are_rejected(
    limit_s: float, waits_s: float
) -> None:
    """A prompt that alone takes longer than the limit may wait as long as its prefill takes."""
    clients = Clients(1, 8, max_ttft_s=limit_s, latency=Latency(0.5, 1.5, 0.0))
    await clients.ask("running")
    await clients.ask("queued")
    await clients.ask("batch", service_class=BATCH)
    await clients.ask("resumed", resume=(1,))
    skip(waits_s - 1.0)  # the clock runs on, and a busy machine may pause
    await asyncio.sleep(0.01)
    assert clients.controller.queued == 3
    skip(1.0)
    await asyncio.sleep(0.01)
    error = rejection(clients, "queued")
    assert isinstance(error, Overloaded)
    assert (error.reason, clients.controller.queued) == (Refusal.SLO_UNREACHABLE, 2)
    await clients.end_all()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "end", "cancel", "error", "wake")),
        st.integers(0, 1000),
    ),
    max_size=25,
)
ERRORS = (None, NO_WORKER, ContextLengthExceeded("too long"))


@settings(max_examples=60)
@given(STEPS)
async def test_bounds_hold_and_nothing_leaks(steps: list[tuple[str, int]]) -> None:
    tenants = Tenants(
        [TenantConfig(name="a", weight=2.0), TenantConfig(name="b", max_concurrent_requests=3)]
    )
    clients = Clients(3, 4, capacity=10, tenants=tenants)
    for i, (step, n) in enumerate(steps):
        match step:
            case "ask":
                await clients.ask(
                    f"r{i}",
                    1 + n % 10,
                    tenant="ab"[n % 2],
                    priority=n % 3,
                    service_class=list(ServiceClass)[n // 2 % 2],
                    model=("demo", "other")[n // 4 % 2],
                )
            case "end" if clients.admitted:
                await clients.end(clients.admitted[n % len(clients.admitted)])
            case "cancel" if clients.tasks:
                await clients.cancel(list(clients.tasks)[n % len(clients.tasks)])
            case "error":
                clients.pool.error = ERRORS[n % len(ERRORS)]
            case "wake":
                clients.controller.wake()
                await settle()
        assert clients.controller.running <= 3
        assert clients.controller.queued <= 4
        assert clients.pool.taken <= 10
    await clients.end_all()
    assert (tenants.concurrent("a"), tenants.concurrent("b")) == (0, 0)
