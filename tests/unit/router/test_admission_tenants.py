"""Limits of tenants: rates, concurrency, and when a retry makes sense."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import TenantConfig
from pdserve.errors import Overloaded, Refusal
from router.admission.tenants import Tenants, TokenBucket


def tenants(**limits: Any) -> Tenants:
    return Tenants([TenantConfig(name="a", **limits), TenantConfig(name="b", weight=3.0)])


def rejection(these: Tenants, tokens: int, now: float) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        these.enter("a", tokens, now)
    return caught.value


def test_requests_a_minute() -> None:
    these = tenants(requests_per_minute=6.0)
    for _ in range(6):
        these.enter("a", 10, 100.0).release(100.5)
    error = rejection(these, 10, 100.0)
    assert (error.reason, error.retry_after_s) == (Refusal.TENANT_REQUEST_RATE, 10.0)
    assert these.concurrent("a") == 0
    these.enter("b", 10, 100.0)
    these.enter("a", 10, 100.0 + error.retry_after_s)


def test_tokens_a_minute_and_one_request_larger_than_a_minute() -> None:
    these = tenants(tokens_per_minute=600.0)
    these.enter("a", 400, 0.0)
    error = rejection(these, 400, 0.0)
    assert (error.reason, error.retry_after_s) == (Refusal.TENANT_TOKEN_RATE, 20.0)
    these.enter("a", 400, 20.0)
    # It is taken from a full bucket, and paid for afterwards.
    assert rejection(these, 6000, 20.0).retry_after_s == 60.0
    these.enter("a", 6000, 80.0)
    assert rejection(these, 10, 80.0).retry_after_s == 541.0


def test_each_rejected_request_is_told_another_time() -> None:
    these = tenants(requests_per_minute=60.0)
    for _ in range(60):
        these.enter("a", 1, 0.0).release(0.1)
    assert [rejection(these, 1, 0.0).retry_after_s for _ in range(5)] == [1, 2, 3, 4, 5]


def test_concurrent_requests() -> None:
    these = tenants(max_concurrent_requests=2)
    first, _ = these.enter("a", 10, 0.0), these.enter("a", 10, 0.0)
    error = rejection(these, 10, 0.0)
    assert error.reason == Refusal.TENANT_CONCURRENCY
    assert error.retry_after_s >= 1.0
    first.release(5.0)
    first.release(5.0)
    assert these.concurrent("a") == 1
    these.enter("a", 10, 5.0)


def test_a_rejected_request_costs_nothing() -> None:
    these = tenants(requests_per_minute=1.0, tokens_per_minute=10.0, max_concurrent_requests=1)
    usage = these.enter("a", 10, 0.0)
    usage.refund()
    usage.refund()
    these.enter("a", 10, 0.0)


def test_weights_and_shares() -> None:
    assert (tenants().share("a"), tenants().share("b")) == (0.25, 0.75)
    none = Tenants()
    none.enter("", 10, 0.0)
    assert (none.weight(""), none.share("")) == (1.0, 1.0)


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
