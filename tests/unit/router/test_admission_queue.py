"""Order of the admission queue, its rate, and the limits of tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import TenantConfig
from pdserve.errors import Overloaded, Refusal
from pdserve.types import GenerateRequest, SamplingParams, ServiceClass
from router.admission.queue import (
    INTERACTIVE_RUN,
    RATE_MIN_SAMPLES,
    AdmissionRate,
    Entry,
    ModelQueue,
)
from router.admission.tenants import Tenant, Tenants, TokenBucket

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH = ServiceClass.BATCH
ACCOUNTS = {
    name: Tenant(TenantConfig(name=name, weight=weight))
    for name, weight in (("a", 1.0), ("b", 1.0), ("c", 1.0), ("twice", 2.0))
}


def entry(tenant: str = "a", *, work: int = 1, arrived: float = 0.0, **request: Any) -> Entry:
    values = {"model": "m", "prompt_token_ids": (), "sampling": SamplingParams(max_tokens=1)}
    made = GenerateRequest(request_id="r", tenant=tenant, **(values | request))  # type: ignore[arg-type]
    return Entry(
        request=made,
        account=ACCOUNTS[tenant],
        arrived=arrived,
        work_tokens=work,
    )


entries = st.lists(
    st.builds(
        entry,
        tenant=st.sampled_from("abc"),
        work=st.integers(1, 1000),
        arrived=st.floats(0, 10),
        priority=st.integers(-2, 2),
        service_class=st.sampled_from(ServiceClass),
        session=st.sampled_from(["", "", "s", "t"]),
    ),
    max_size=40,
)


def queue_of(queued: Iterable[Entry]) -> ModelQueue:
    queue = ModelQueue()
    for one in queued:
        queue.push(one)
    return queue


def drain(queue: ModelQueue, most: int = 10_000, began: float = 100.0) -> list[Entry]:
    order: list[Entry] = []
    while len(queue) and len(order) < most:
        order.append(next(queue.in_order()))
        queue.admitted(order[-1], now=began + len(order))
    return order


@given(entries, st.data())
def test_all_are_admitted_once_and_by_rank_within_tenant_and_class(
    queued: list[Entry], data: st.DataObject
) -> None:
    queue = queue_of(queued)
    gone = {one for one in queued if data.draw(st.booleans())}
    for one in gone:
        queue.remove(one)
    assert set(queue.in_order()) == set(queued) - gone
    order = drain(queue)
    assert len(order) == len(set(order)) == len(queued) - len(gone)
    ranks: dict[tuple[str, bool], list[tuple[int, float, int]]] = {}
    for one in order:
        if not one.request.session:
            ranks.setdefault((one.request.tenant, one.is_batch), []).append(one.rank)
    assert all(found == sorted(found) for found in ranks.values())


@given(entries)
def test_batch_goes_last_but_not_never(queued: list[Entry]) -> None:
    order = drain(queue_of(queued))
    run = 0
    for i, one in enumerate(order):
        if one.is_batch:
            assert run == INTERACTIVE_RUN or all(x.is_batch for x in order[i:])
            run = 0
        elif any(x.is_batch for x in order[i:]):
            run += 1
        assert run <= INTERACTIVE_RUN


def test_a_request_behind_a_blocked_one_gets_its_turn_however_often_the_capacity_changes() -> None:
    large, small = entry(), entry(arrived=1.0)
    large.kv_tokens = 2
    queue = queue_of([large, small])
    turns = []
    for _ in range(4):
        found = queue.next_turn()
        assert found is not None
        turns.append(found)
        queue.block(found)
        queue.unblock(after_scan=True)
    assert turns == [large, small, large, small]
    queue.unblock()
    assert queue.next_turn() is large


@given(st.lists(st.integers(1, 100), min_size=200, max_size=200), st.integers(20, 100))
def test_tenants_share_by_weight(work: list[int], admitted: int) -> None:
    """While both have queued requests, their weighted work differs by at most one request each."""
    queued = [entry("twice", work=w, arrived=float(i)) for i, w in enumerate(work)]
    queued += [entry("b", work=w, arrived=float(i)) for i, w in enumerate(reversed(work))]
    done = {"twice": 0.0, "b": 0.0}
    for one in drain(queue_of(queued), admitted):
        done[one.request.tenant] += one.work_tokens / one.account.weight
    assert abs(done["twice"] - done["b"]) <= 100 / 2 + 100


def test_a_tenant_earns_no_credit_while_it_asks_for_nothing() -> None:
    queue = queue_of(entry(work=10) for _ in range(20))
    drain(queue, 10)
    for _ in range(10):
        queue.push(entry("b", work=10))
    order = [one.request.tenant for one in drain(queue, 10)]
    assert 4 <= order.count("a") <= 6


@given(entries, st.sets(st.integers(0, 39)), st.sampled_from(["", "s"]))
def test_work_before_a_request_forgets_those_that_gave_up(
    queued: list[Entry], gone: set[int], session: str
) -> None:
    queue = queue_of(queued)
    for one in [x for i, x in enumerate(queued) if i in gone]:
        queue.remove(one)
    newcomer = entry("b", arrived=5.0, session=session)
    left = queue_of(x for i, x in enumerate(queued) if i not in gone)
    assert queue.work_before(newcomer) == left.work_before(newcomer)


def test_work_before_a_request_is_its_tenants_and_the_others_shares() -> None:
    first, last = entry(work=100, arrived=1.0), entry(work=50, arrived=3.0)
    queue = queue_of([first, last, entry("b", work=30)])
    assert queue.work_before(entry(arrived=2.0)) == 130
    assert queue.work_before(entry(arrived=2.0, service_class=BATCH)) == 0
    assert queue.work_before(entry("c")) == 0


def test_sessions_of_a_tenant_take_turns_and_those_without_one_are_one_each() -> None:
    many = [entry(session="many", arrived=float(i)) for i in range(4)]
    others = [entry(session=x, arrived=5.0 + i) for i, x in enumerate(("one", "", "two", ""))]
    queue = queue_of([*many, *others])
    assert drain(queue, 6) == [many[0], *others, many[1]]
    # One that comes now goes behind the session that waited for its turn.
    queue.push(new := entry(session="new", arrived=110.0))
    assert drain(queue, began=110.0) == [many[2], new, many[3]]


def test_a_sessions_more_urgent_request_goes_before_its_others() -> None:
    usual, urgent = entry(session="s"), entry(session="s", priority=-1, arrived=1.0)
    other = entry(session="other", arrived=0.5)
    queue = queue_of([usual, other, urgent])
    assert list(queue.in_order()) == [urgent, other, usual]
    queue.remove(urgent)
    assert list(queue.in_order()) == [usual, other]


def test_requests_behind_others_of_their_session_may_fit_where_those_do_not() -> None:
    large, small = entry(session="s"), entry(session="s", arrived=1.0)
    large.kv_tokens = 2
    queue = queue_of([large, small])
    queue.block(large)
    assert queue.next_turn() is small


def test_work_before_a_sessions_request_is_as_many_turns_of_the_others() -> None:
    mine = [entry(session="mine", work=1) for _ in range(2)]
    others = [entry(session="many", work=10, arrived=9.0) for _ in range(5)]
    queue = queue_of([*mine, *others, entry(work=100, arrived=9.0)])
    assert queue.work_before(entry(session="mine")) == 2 + 3 * 10 + 100
    assert queue.work_before(entry(session="new", arrived=5.0)) == 1


def test_the_rate_counts_only_time_with_a_backlog() -> None:
    rate, now = AdmissionRate(), 0.0
    assert rate.wait_s(100, now) is None
    for _ in range(RATE_MIN_SAMPLES):
        rate.set_backlog(True, now)
        now += 2.0
        rate.admitted(10, now)
        rate.set_backlog(False, now)
        now += 100.0
    assert rate.interval_s(now) == pytest.approx(2.0)
    assert rate.wait_s(50, now) == pytest.approx(10.0)


def test_a_pause_after_a_burst_weighs_as_one_admission() -> None:
    rate = AdmissionRate()
    rate.set_backlog(True, 0.0)
    for _ in range(RATE_MIN_SAMPLES):
        rate.admitted(10, 0.0)
    assert rate.interval_s(0.9) == pytest.approx(0.9 / (RATE_MIN_SAMPLES + 1))


def tenant(**limits: Any) -> Tenant:
    return Tenant(TenantConfig(name="a", **limits))


def rejection(this: Tenant, tokens: int, now: float) -> tuple[str, float]:
    with pytest.raises(Overloaded) as caught:
        this.enter(tokens, now)
    return caught.value.reason, caught.value.retry_after_s


def test_requests_a_minute_and_another_time_for_each_that_is_rejected() -> None:
    this = tenant(requests_per_minute=6.0)
    for _ in range(6):
        this.enter(10, 100.0)
        this.leave(0.5)
    for retry_after_s in (10.0, 20.0, 30.0):
        assert rejection(this, 10, 100.0) == (Refusal.TENANT_REQUEST_RATE, retry_after_s)
    assert this.open_requests == 0
    this.enter(10, 110.0)


def test_tokens_a_minute_and_one_request_larger_than_a_minute() -> None:
    this = tenant(tokens_per_minute=600.0)
    this.enter(400, 0.0)
    assert rejection(this, 400, 0.0) == (Refusal.TENANT_TOKEN_RATE, 20.0)
    this.enter(400, 20.0)
    # It is taken from a full bucket, and paid for afterwards.
    assert rejection(this, 6000, 20.0)[1] == 60.0
    this.enter(6000, 80.0)
    assert rejection(this, 10, 80.0)[1] == 541.0


def test_a_rejected_request_costs_nothing() -> None:
    this = tenant(requests_per_minute=1.0, tokens_per_minute=10.0, max_concurrent_requests=1)
    for _ in range(3):
        this.enter(10, 0.0)
        this.refund(10)


def test_each_answer_is_an_open_request_but_one_request_can_always_run() -> None:
    this = tenant(max_concurrent_requests=4)
    this.enter(10, 0.0, 3)
    with pytest.raises(Overloaded, match="3 open requests, this one counts as 2, and the limit is"):
        this.enter(10, 0.0, 2)
    this.enter(10, 0.0)
    this.leave(0.5)
    this.leave(0.5, 3)
    this.enter(10, 0.0, 128)
    assert this.open_requests == 4
    this.refund(10, 128)
    assert this.open_requests == 0


def test_weights_and_shares() -> None:
    both = Tenants([TenantConfig(name="a"), TenantConfig(name="b", weight=3.0)])
    assert (both.share("a"), both.share("b"), both["b"].weight) == (0.25, 0.75, 3.0)
    none = Tenants()
    none[""].enter(10, 0.0)
    assert (none[""].weight, none.share(""), none.names()) == (1.0, 1.0, [])


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 20.0)), max_size=50))
def test_a_bucket_never_gives_more_than_its_rate_and_its_size(
    asked: list[tuple[float, float]],
) -> None:
    bucket, taken = TokenBucket(per_minute=20.0), 0.0
    for at, amount in sorted(asked):
        wait_s = bucket.wait_s(amount, at)
        if wait_s == 0.0:
            bucket.take(amount)
            taken += amount
        assert taken <= 20.0 + 20.0 / 60.0 * at + 1e-6
        assert wait_s <= 60.0 + 1e-6
