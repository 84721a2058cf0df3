"""The order of the queue: its rules one by one, and that nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.types import ServiceClass
from router.admission.order import (
    INTERACTIVE_RUN,
    MAX_PASSES,
    SCAN_TRIES,
    TURN_SLACK,
    TURN_SPACING,
    ModelQueue,
    Waiting,
    scan,
)

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH


def push(queue: ModelQueue, **values: Any) -> Waiting:
    waiting = Waiting(**values)
    queue.push(waiting)
    return waiting


def grant(queue: ModelQueue) -> Waiting:
    chosen = scan(queue, lambda _: True).chosen
    assert chosen is not None
    queue.granted(chosen)
    return chosen


def drain(queue: ModelQueue) -> list[Waiting]:
    return [grant(queue) for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"due": 5.0}, {"due": 5.0}),
        ({"due": 4.0}, {"due": 5.0}),
        ({"priority": -1, "due": 9.0}, {"due": 1.0}),
        ({"priority": 3, "due": 9.0}, {"priority": 4, "due": 1.0}),
        ({"priority": 9, "due": 9.0}, {"due": 1.0, "service_class": BATCH}),
    ],
)
def test_who_goes_first(first: dict[str, Any], second: dict[str, Any]) -> None:
    queue = ModelQueue()
    a, b = push(queue, **first), push(queue, **second)
    assert drain(queue) == [a, b]
    if first != second:
        b, a = push(queue, **second), push(queue, **first)
        assert drain(queue) == [a, b], "whichever came first"


def test_batch_goes_when_nobody_else_waits_and_once_in_a_run_of_interactive() -> None:
    queue = ModelQueue()
    waiting = [push(queue, service_class=BATCH)]
    assert drain(queue) == waiting
    waiting = [push(queue, service_class=c) for c in [INTERACTIVE] * 20 + [BATCH] * 3]
    classes = [w.service_class for w in drain(queue)]
    run = [INTERACTIVE] * INTERACTIVE_RUN + [BATCH]
    assert classes == [*run, *run, *[INTERACTIVE] * 4, BATCH]


def test_without_a_seat_for_batch_interactive_goes_on() -> None:
    queue = ModelQueue()
    batch, other = push(queue, service_class=BATCH), push(queue)
    assert scan(queue, lambda _: True, with_batch=False).chosen is other
    queue.granted(other)
    assert scan(queue, lambda _: True, with_batch=False).chosen is None
    assert grant(queue) is batch


def test_one_that_left_is_not_seen_again() -> None:
    queue = ModelQueue()
    a, b, c = (push(queue, due=float(i)) for i in range(3))
    queue.left(a)
    assert len(queue) == 2
    assert drain(queue) == [b, c]


def test_memory_is_bounded_by_those_that_wait() -> None:
    queue = ModelQueue()
    oldest = push(queue, priority=9)
    for i in range(5000):
        queue.left(push(queue, due=float(i), tenant=f"t{i % 3}"))
    tenants = queue._interactive._tenants.values()
    assert sum(len(t._by_rank) + len(t._by_age) for t in tenants) < 1000
    assert len(queue._interactive._heap) < 200
    assert drain(queue) == [oldest]


# Room.


def test_a_large_one_without_room_is_passed_so_often_and_no_more() -> None:
    queue = ModelQueue()
    large = push(queue, kv_tokens=100)
    for _ in range(MAX_PASSES):
        small = push(queue, kv_tokens=1, due=1.0)
        found = scan(queue, lambda w: w.kv_tokens < 50)
        assert (found.chosen, found.blocked) == (small, [large])
        queue.granted(small)
    push(queue, kv_tokens=1, due=1.0)
    assert scan(queue, lambda w: w.kv_tokens < 50).chosen is None, "room comes together now"
    assert grant(queue) is large


def test_nobody_is_tried_who_needs_no_less_than_one_that_found_no_room() -> None:
    queue = ModelQueue()
    a = push(queue, prompt_tokens=10, kv_tokens=20)
    push(queue, prompt_tokens=10, kv_tokens=20, due=1.0)
    push(queue, prompt_tokens=50, kv_tokens=60, due=2.0)
    b = push(queue, prompt_tokens=9, kv_tokens=60, due=3.0)
    c = push(queue, prompt_tokens=8, kv_tokens=60, due=4.0)
    tried: list[Waiting] = []

    def has_room(waiting: Waiting) -> bool:
        tried.append(waiting)
        return waiting is c

    assert scan(queue, has_room).chosen is c
    assert tried == [a, b, c]


def test_few_are_tried_in_one_look() -> None:
    queue = ModelQueue()
    for size in range(100, 0, -1):
        push(queue, kv_tokens=size)
    found = scan(queue, lambda _: False)
    assert (found.chosen, len(found.blocked)) == (None, SCAN_TRIES)


# Nobody waits for ever.

SEEDS = st.integers(0, 1 << 32)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(-3, 3),  # priority
        st.floats(-100.0, 100.0),  # due
        st.integers(1, 6),  # KV tokens
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), ARRIVALS, SEEDS)
def test_every_one_is_granted_within_its_bound_whatever_comes(
    ahead: int, arrivals: list[tuple[int, float, int]], seed: int
) -> None:
    """The victim has the worst rank there is and needs all room; whoever comes goes before it by
    rank, and takes room that only now and then comes together."""
    random = Random(seed)
    queue = ModelQueue()
    for _ in range(ahead):
        push(queue, kv_tokens=random.randint(1, 6))
    victim = push(queue, priority=1 << 40, due=1e9, kv_tokens=6)
    bound = TURN_SLACK + (TURN_SPACING + MAX_PASSES) * (ahead + 1)
    grants = looks_in_vain = 0
    while not victim.gone:
        for priority, due, tokens in random.sample(arrivals, min(2, len(arrivals))):
            push(queue, priority=priority, due=due, kv_tokens=tokens)
        # Room for the largest comes at the latest when nobody else could go.
        room = 6 if looks_in_vain else random.randint(0, 6)
        chosen = scan(queue, lambda w, room=room: w.kv_tokens <= room).chosen  # type: ignore[misc]
        looks_in_vain = 0 if chosen is not None else looks_in_vain + 1
        if chosen is not None:
            queue.granted(chosen)
            grants += 1
        assert grants <= bound


@pytest.mark.parametrize(("tenants", "ahead", "seed"), [(1, 4, 0), (3, 0, 1)])
def test_a_batch_request_of_a_light_tenant_is_granted_within_its_bound(
    tenants: int, ahead: int, seed: int
) -> None:
    """Over classes and tenants the bounds multiply: one grant in INTERACTIVE_RUN + 1 is batch's,
    and of these a tenant has its share by weight."""
    random = Random(seed)
    queue = ModelQueue()
    for _ in range(ahead):
        push(queue, service_class=BATCH, tenant="light", work_tokens=10)
    victim = push(queue, service_class=BATCH, tenant="light", priority=99, due=1e9, work_tokens=10)
    own = TURN_SLACK + TURN_SPACING * (ahead + 1)
    # Each of the others has twice the weight, and asks for half the tokens at a time.
    bound = (INTERACTIVE_RUN + 1) * own * (1 + 4 * tenants) + 1
    grants = 0
    while not victim.gone:
        push(queue, priority=random.randint(-5, 5))
        for i in range(tenants):
            push(queue, service_class=BATCH, tenant=f"t{i}", weight=2.0, work_tokens=5)
        if random.random() < 0.5:
            push(queue, service_class=BATCH, tenant="light", work_tokens=10)
        grant(queue)
        grants += 1
        assert grants <= bound


# Shares.


def test_tenants_share_by_weight_in_tokens_however_much_one_asks_for() -> None:
    queue = ModelQueue()
    # The greedy one has a hundred times as many requests waiting, and larger ones.
    for i in range(3000):
        push(queue, tenant="greedy", weight=1.0, work_tokens=50 + i % 100)
    had: Counter[str] = Counter()
    waiting = Counter[str]()
    for _ in range(2000):
        for name, weight in (("a", 1.0), ("b", 2.0)):
            while waiting[name] < 30:
                push(queue, tenant=name, weight=weight, work_tokens=10 + waiting[name])
                waiting[name] += 1
        chosen = grant(queue)
        waiting[chosen.tenant] -= 1
        had[chosen.tenant] += chosen.work_tokens
    whole = sum(had.values())
    shares = {name: tokens / whole for name, tokens in had.items()}
    assert shares == pytest.approx({"greedy": 0.25, "a": 0.25, "b": 0.5}, rel=0.02)


def test_time_without_requests_is_no_credit_and_use_alone_no_debt() -> None:
    queue = ModelQueue()
    for _ in range(100):
        push(queue, tenant="a", work_tokens=1000)
        grant(queue)
    for name in ("a", "late"):
        for _ in range(40):
            push(queue, tenant=name, work_tokens=10)
    had = Counter(grant(queue).tenant for _ in range(40))
    assert had["late"] == pytest.approx(20, abs=2)
