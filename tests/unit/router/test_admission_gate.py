"""The gate, step by step on a clock of the test's: seats, deadlines, models, and what is given
back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.types import SamplingParams, ServiceClass
from router.admission.gate import Gate, Grant, Place
from router.admission.limits import PREDICTED_OUTPUT_TOKENS, AdmissionLimits, Bid, bid_of
from router.admission.tenants import Tenant, Tenants
from tests.unit.router.asking import request

BATCH = ServiceClass.BATCH


class Room:
    """KV tokens, and how many were taken at most."""

    def __init__(self, tokens: int = 1000) -> None:
        self.free = self.least = tokens

    def take(self, tokens: int) -> Held | None:
        if tokens > self.free:
            return None
        self.free -= tokens
        self.least = min(self.least, self.free)
        return Held(self, tokens)


class Held:
    def __init__(self, room: Room, tokens: int) -> None:
        self._room, self._tokens = room, tokens

    def release(self) -> None:
        self._room.free += self._tokens
        self._tokens = 0


class Waiter:
    """What became of one request."""

    def __init__(self) -> None:
        self.grant: Grant[Held] | None = None
        self.error: PdserveError | None = None
        self.place: Place | None = None
        self.is_gone = False

    def granted(self, grant: Grant[Held]) -> None:
        self.grant = grant

    def refused(self, error: PdserveError) -> None:
        self.error = error


class Desk:
    """A gate, its clock and its room."""

    def __init__(self, limits: AdmissionLimits, tenants: Tenants | None = None) -> None:
        self.now = 100.0
        self.room = Room()
        self.gate = Gate(limits, clock=lambda: self.now, tenants=tenants)

    def ask(self, model: str = "demo", **bid: Any) -> Waiter:
        asked, waiter = Bid(model, **{"kv_tokens": 1, **bid}), Waiter()
        outcome = self.gate.offer(asked, lambda: self.room.take(asked.kv_tokens), waiter)
        if isinstance(outcome, Place):
            waiter.place = outcome
            self.gate.settle(outcome)
        else:
            waiter.grant = outcome
        return waiter

    def expire(self, waiters: list[Waiter]) -> list[PdserveError]:
        """As their timers would."""
        found = []
        for waiter in filter(waits, waiters):
            assert waiter.place is not None
            if (waiter.place.ends_at or self.now + 1.0) <= self.now:
                waiter.error = self.gate.expire(waiter.place)
                found.append(waiter.error)
        return found


def waits(waiter: Waiter) -> bool:
    return waiter.grant is None and waiter.error is None


def learn(desk: Desk, *models: str) -> None:
    """A hundred tokens of a prompt are computed in a second."""
    for model in models or ("demo",):
        for tokens in range(25, 225, 25):
            desk.gate.drain.prefilled(model, tokens, tokens / 100.0)


def end(waiter: Waiter) -> None:
    assert waiter.grant is not None
    waiter.grant.release()


def test_batch_leaves_seats_to_others() -> None:
    desk = Desk(AdmissionLimits(4, 9, batch_share=0.5))
    batch = [desk.ask(service_class=BATCH) for _ in range(3)]
    others = [desk.ask(), desk.ask()]
    assert [w.grant is not None for w in (*batch, *others)] == [True, True, False, True, True]
    end(others[0])
    assert batch[2].grant is None, "a seat is free, but not for batch"
    end(batch[0])
    assert batch[2].grant is not None


def test_a_turn_that_comes_too_late_is_a_refusal_before_anything_is_reserved() -> None:
    tenants = Tenants([Tenant("a", tokens_per_minute=60.0)])
    desk = Desk(AdmissionLimits(1, 9), tenants)
    learn(desk)
    first = desk.ask(tenant="a")
    late = desk.ask(tenant="a", prompt_tokens=200, work_tokens=30, deadline=105.0)
    desk.now = 103.5
    end(first)
    assert late.grant is None
    assert isinstance(late.error, Unavailable)
    assert late.error.reason == Refusal.DEADLINE_UNREACHABLE
    assert late.error.retry_after_s >= 1.0
    assert (desk.gate.running, desk.gate.queued, desk.room.free) == (0, 0, 1000)
    assert tenants.concurrent("a") == 0
    # What was not served was not charged: of 60 tokens one was used.
    end(desk.ask(tenant="a", work_tokens=59))


def test_one_that_could_never_be_in_time_is_refused_as_it_comes() -> None:
    desk = Desk(AdmissionLimits(1, 9))
    learn(desk)
    with pytest.raises(Unavailable, match=r"predicted 3.0\d s after") as caught:
        desk.ask(prompt_tokens=500, deadline=102.0)
    assert caught.value.reason == Refusal.DEADLINE_UNREACHABLE
    assert desk.room.free == 1000


@pytest.mark.parametrize("woken", [False, True])
def test_one_that_gave_up_is_taken_out_once_though_others_are_woken_before_it_says_so(
    woken: bool,
) -> None:
    tenants = Tenants([Tenant("a")])
    desk = Desk(AdmissionLimits(2, 9), tenants)
    learn(desk)
    first = desk.ask(tenant="a", kv_tokens=1000)
    late = desk.ask(tenant="a", prompt_tokens=10, deadline=101.0)
    assert late.place is not None
    desk.now, late.is_gone = 100.95, True
    if woken:
        desk.gate.wake()
    assert isinstance(desk.gate.expire(late.place), Unavailable)
    assert (desk.gate.running, desk.gate.queued, tenants.concurrent("a")) == (1, 0, 1)
    end(desk.ask(tenant="a", kv_tokens=0))
    end(first)
    assert (desk.gate.running, desk.gate.queued, tenants.concurrent("a")) == (0, 0, 0)
    assert desk.room.free == 1000


def test_models_take_turns_at_seats() -> None:
    desk = Desk(AdmissionLimits(1, 99))
    running = desk.ask("a")
    waiting = {name: [desk.ask(name) for _ in range(3)] for name in ("a", "b")}
    order = []
    while desk.gate.queued:
        end(running)
        (running,) = (
            w for ws in waiting.values() for w in ws if w.grant is not None and w not in order
        )
        order.append(running)
    names = ["a" if w in waiting["a"] else "b" for w in order]
    assert names in (["a", "b"] * 3, ["b", "a"] * 3)


def test_a_bid_counts_every_answer_and_no_more_of_each_than_is_likely() -> None:
    sampling = SamplingParams(max_tokens=4000, n=3)
    bid = bid_of(request(sampling=sampling), kv_tokens=9000, deadline=None)
    assert (bid.prompt_tokens, bid.kv_tokens) == (40, 9000)
    assert bid.work_tokens == 40 + 3 * PREDICTED_OUTPUT_TOKENS
    again = bid_of(request(sampling=sampling, request_id="r2"), kv_tokens=9000, deadline=5.0)
    assert again.identity == bid.identity, "the same request, come again"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nothing_is_exceeded_and_nothing_leaks(seed: int) -> None:
    random = Random(seed)
    tenants = Tenants(
        [
            Tenant("a", weight=3.0, max_concurrent_requests=9),
            Tenant("b"),
            Tenant("c", tokens_per_minute=600.0),
        ]
    )
    limits = AdmissionLimits(6, 10, batch_share=0.5, ttft_s=0.4)
    desk = Desk(limits, tenants)
    learn(desk, *"xy")
    open_: list[Waiter] = []
    refusals: list[PdserveError] = []
    for _ in range(3000):
        desk.now += random.random() / 10
        what = random.random()
        if what < 0.7:
            try:
                waiter = desk.ask(
                    random.choice("xy"),
                    prompt_tokens=random.randint(1, 30),
                    kv_tokens=random.randint(1, 400),
                    work_tokens=random.randint(1, 300),
                    priority=random.randint(-2, 2),
                    tenant=random.choice("abc"),
                    service_class=random.choice(list(ServiceClass)),
                    deadline=random.choice([None, desk.now + random.random() * 3]),
                    identity=(random.randint(0, 50),),
                    has_slo=random.random() < 0.5,
                )
            except (Overloaded, Unavailable) as error:
                refusals.append(error)
                continue
            open_.append(waiter)
        elif open_:
            waiter = random.choice(open_)
            if waiter.grant is not None:
                waiter.grant.release()
            elif waiter.error is None:
                waiter.is_gone = True
                assert waiter.place is not None
                desk.gate.leave(waiter.place)
            open_.remove(waiter)
        refusals += desk.expire(open_)
        granted = [w for w in open_ if w.grant is not None]
        assert desk.gate.running == len(granted) <= limits.max_running_requests
        assert desk.gate.queued == sum(map(waits, open_)) <= limits.max_queued_requests
        assert desk.room.least >= 0
        assert tenants.concurrent("a") <= 9
    for waiter in open_:
        if waiter.grant is None and waiter.place is not None:
            desk.gate.leave(waiter.place)
        elif waiter.grant is not None:
            waiter.grant.release()
    for waiter in open_:
        if waiter.grant is not None:
            waiter.grant.release()
    assert (desk.gate.running, desk.gate.queued, desk.room.free) == (0, 0, 1000)
    assert [tenants.concurrent(name) for name in "abc"] == [0, 0, 0]
    reasons = {error.reason for error in refusals}
    assert reasons & {Refusal.QUEUE_FULL, Refusal.NO_ROOM}
    assert reasons >= {
        *(Refusal.SLO_UNREACHABLE, Refusal.TENANT_TOKEN_RATE, Refusal.TENANT_CONCURRENCY)
    }
    assert all(e.retry_after_s > 0.0 or isinstance(e, DeadlineExceeded) for e in refusals)
    assert not desk.gate._queued_of
