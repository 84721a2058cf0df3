"""Order of the admission queue, and its rate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import ServiceClass
from router.admission.queue import (
    INTERACTIVE_RUN,
    RATE_MIN_SAMPLES,
    AdmissionRate,
    ModelQueue,
    QueuedRequest,
)

BATCH = ServiceClass.BATCH

requests = st.lists(
    st.builds(
        QueuedRequest,
        work_tokens=st.integers(1, 1000),
        priority=st.integers(-2, 2),
        due=st.floats(0, 10),
        service_class=st.sampled_from(ServiceClass),
        tenant=st.sampled_from("abc"),
    ),
    max_size=40,
)


def queue_of(*queued: QueuedRequest) -> ModelQueue[QueuedRequest]:
    queue = ModelQueue[QueuedRequest]()
    for request in queued:
        queue.push(request)
    return queue


def drain(queue: ModelQueue[QueuedRequest], most: int = 10_000) -> list[QueuedRequest]:
    order = []
    while len(queue) and len(order) < most:
        order.append(next(queue.in_order()))
        queue.admitted(order[-1])
    return order


def make(**values: Any) -> QueuedRequest:
    return QueuedRequest(**values)


@given(requests, st.data())
def test_all_are_admitted_once_and_by_rank_within_tenant_and_class(
    queued: list[QueuedRequest], data: st.DataObject
) -> None:
    queue = queue_of(*queued)
    gone = [r for r in queued if data.draw(st.booleans())]
    for request in gone:
        queue.remove(request)
    assert set(queue.in_order()) == set(queued) - set(gone)
    order = drain(queue)
    assert Counter(map(id, order)) == Counter(id(r) for r in queued if r not in gone)
    for tenant in "abc":
        for service_class in ServiceClass:
            ranks = [
                r.rank for r in order if (r.tenant, r.service_class) == (tenant, service_class)
            ]
            assert ranks == sorted(ranks)


@given(requests)
def test_batch_goes_last_but_not_never(queued: list[QueuedRequest]) -> None:
    order = drain(queue_of(*queued))
    run = 0
    for i, request in enumerate(order):
        batch_waits = any(r.service_class is BATCH for r in order[i:])
        if request.service_class is BATCH:
            assert run == INTERACTIVE_RUN or all(r.service_class is BATCH for r in order[i:])
            run = 0
        elif batch_waits:
            run += 1
        assert run <= INTERACTIVE_RUN


@given(
    st.lists(st.integers(1, 100), min_size=200, max_size=200),
    st.floats(0.5, 4.0),
    st.integers(20, 100),
)
def test_tenants_share_by_weight(work: list[int], weight: float, admitted: int) -> None:
    """While both have requests queued, their work by weight differs by one request of each."""
    queue = queue_of(
        *(make(tenant="a", weight=weight, work_tokens=w, due=float(i)) for i, w in enumerate(work)),
        *(make(tenant="b", work_tokens=w, due=float(i)) for i, w in enumerate(reversed(work))),
    )
    done = {"a": 0.0, "b": 0.0}
    for request in drain(queue, admitted):
        done[request.tenant] += request.work_tokens / request.weight
    assert abs(done["a"] - done["b"]) <= 100 / weight + 100


def test_a_tenant_earns_no_credit_while_it_asks_for_nothing() -> None:
    queue = queue_of(*(make(tenant="a", work_tokens=10) for _ in range(20)))
    drain(queue, 10)
    for _ in range(10):
        queue.push(make(tenant="b", work_tokens=10))
    order = [r.tenant for r in drain(queue, 10)]
    assert 4 <= order.count("a") <= 6


def test_work_before_a_request_is_its_tenants_and_the_others_shares() -> None:
    queue = queue_of(
        make(tenant="a", work_tokens=100, due=1.0),
        make(tenant="a", work_tokens=50, due=3.0),
        make(tenant="b", work_tokens=30),
    )
    assert queue.work_before(make(tenant="a", due=2.0)) == 130
    assert queue.work_before(make(tenant="a", due=2.0, service_class=BATCH)) == 0
    assert queue.work_before(make(tenant="c")) == 0


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
