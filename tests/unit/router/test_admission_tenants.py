"""Tenants: rates, caps, what a refusal costs, and when to come again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded, Refusal
from router.admission.limits import Bid
from router.admission.tenants import Stay, Tenant, Tenants, TokenBucket


def bid(work_tokens: int = 10, identity: int = 0) -> Bid:
    return Bid("demo", tenant="a", work_tokens=work_tokens, identity=(identity,))


def tenants(**limits: Any) -> Tenants:
    return Tenants([Tenant("a", **limits), Tenant("b")])


def refusal(these: Tenants, asked: Bid, now: float) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        these.enter(asked, now)
    return caught.value


def test_requests_a_minute() -> None:
    these = tenants(requests_per_minute=6.0)
    for i in range(6):
        these.enter(bid(identity=i), 100.0).release(100.5)
    error = refusal(these, bid(identity=6), 100.0)
    assert (error.reason, error.retry_after_s) == (Refusal.TENANT_REQUEST_RATE, 10.0)
    assert these.concurrent("a") == 0
    these.enter(Bid("demo", tenant="b"), 100.0)
    these.enter(bid(identity=6), 100.0 + error.retry_after_s)


def test_tokens_a_minute_and_one_request_larger_than_a_minute() -> None:
    these = tenants(tokens_per_minute=600.0)
    these.enter(bid(400), 0.0)
    error = refusal(these, bid(400, 1), 0.0)
    assert (error.reason, error.retry_after_s) == (Refusal.TENANT_TOKEN_RATE, 20.0)
    these.enter(bid(400, 1), 20.0)
    # From a full bucket, and paid for afterwards.
    error = refusal(these, bid(6000, 2), 20.0)
    assert error.retry_after_s == 60.0
    these.enter(bid(6000, 2), 80.0)
    assert refusal(these, bid(10, 3), 80.0).retry_after_s == 541.0


def test_requests_at_one_time() -> None:
    these = tenants(max_concurrent_requests=2)
    first, _ = these.enter(bid(), 0.0), these.enter(bid(), 0.0)
    error = refusal(these, bid(), 0.0)
    assert error.reason == Refusal.TENANT_CONCURRENCY
    assert error.retry_after_s >= 1.0
    first.release(5.0)
    first.release(5.0)
    assert these.concurrent("a") == 1
    these.enter(bid(), 5.0)


def test_what_was_refused_elsewhere_costs_nothing() -> None:
    these = tenants(requests_per_minute=1.0, tokens_per_minute=10.0, max_concurrent_requests=1)
    stay = these.enter(bid(10), 0.0)
    stay.refuse(0.0)
    stay.refuse(0.0)
    these.enter(bid(10), 0.0)


def test_many_who_are_over_their_rate_are_told_different_times_and_taken_then() -> None:
    these = tenants(requests_per_minute=60.0)
    for i in range(60):
        these.enter(bid(identity=i), 0.0).release(0.1)
    told = [(refusal(these, bid(identity=100 + i), 0.0).retry_after_s, i) for i in range(20)]
    assert len({seconds for seconds, _ in told}) == 20
    for seconds, i in told:
        # A new one does not take what was promised.
        refusal(these, bid(identity=1000 + i), seconds)
        these.enter(bid(identity=100 + i), seconds).release(seconds)


def test_nothing_is_kept_for_clients_who_do_not_come_again() -> None:
    these = tenants(requests_per_minute=60.0)
    taken = 0
    for i in range(6000):
        try:
            these.enter(bid(identity=i), i / 10.0).release(i / 10.0)
        except Overloaded:
            continue
        taken += 1
    assert taken > 0.9 * 600


def test_without_tenants_everyone_is_taken() -> None:
    none = Tenants()
    for _ in range(100):
        none.enter(Bid("demo"), 0.0)
    assert none.weight("") == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 20.0)), max_size=50))
def test_a_bucket_never_gives_more_than_its_rate_and_its_size(
    asked: list[tuple[float, float]],
) -> None:
    bucket, taken = TokenBucket(rate=2.0, size=20.0), 0.0
    for at, amount in sorted(asked):
        wait_s = bucket.wait_s(amount, at)
        if wait_s == 0.0:
            bucket.take(amount)
            taken += amount
        assert taken <= 20.0 + 2.0 * at + 1e-6
        assert wait_s <= 10.0 + 1e-6
        assert bucket.wait_s(amount, at) >= 0.0


def test_a_stay_has_the_weight_of_its_tenant() -> None:
    these = Tenants([Tenant("a", weight=3.0)])
    stay: Stay = these.enter(bid(), 0.0)
    assert (stay.weight, these.weight("a")) == (3.0, 3.0)
