"""What the next attempt may use after a failure, and how much may be computed again."""

from __future__ import annotations

import pytest

from pdserve.errors import (
    BudgetExhausted,
    Overloaded,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from router.retry import MOVED, Constraints, RetryBudget, RetryPolicy, RetryStep

SAME, OTHER, AGGREGATED = RetryStep
DEAD = WorkerFailed("gone")


def steps(retry: RetryPolicy, *, tokens: int = 0, pair_helps: bool = True) -> list[RetryStep]:
    """Take all steps that are left."""
    found = []
    while (constraints := retry.next("p", pair_helps=pair_helps)) is not None:
        retry.continued(constraints.step, "x", tokens)
        found.append(constraints.step)
    return found


@pytest.mark.parametrize(
    ("worker", "error", "expected"),
    [
        pytest.param("p", DEAD, [OTHER, AGGREGATED], id="prefill worker died"),
        pytest.param("p", Unavailable("x"), [OTHER, AGGREGATED], id="prefill worker drains"),
        pytest.param("p", Overloaded("x"), [SAME, OTHER, AGGREGATED], id="prefill worker full"),
        pytest.param("d", DEAD, [SAME, OTHER, AGGREGATED], id="decode worker died"),
        pytest.param("d", TransferFailed("x"), [SAME, OTHER, AGGREGATED], id="transfer failed"),
        pytest.param("p", TransferCorrupted("x"), [OTHER, AGGREGATED], id="KV damaged"),
    ],
)
def test_the_failure_decides_the_first_step(
    worker: str, error: PdserveError, expected: list[RetryStep]
) -> None:
    retry = RetryPolicy()
    retry.failed(worker, "p", error, 0)
    assert steps(retry) == expected
    assert len(retry.done) == len(expected)


def test_a_worker_that_failed_takes_no_part_and_one_with_bad_luck_may() -> None:
    retry = RetryPolicy()
    retry.failed("d", "p", DEAD, 3)
    failed, both = frozenset({"d"}), frozenset({"d", "p"})
    assert retry.next("p", pair_helps=True) == Constraints(SAME, "p", failed, failed)
    retry.failed("p", "p", TransferFailed("x"), 3)
    assert retry.next("p", pair_helps=True) == Constraints(OTHER, "", failed, both)
    assert retry.next("p", pair_helps=True) == Constraints(AGGREGATED, avoid=both)


def test_for_the_last_token_a_pair_does_not_help() -> None:
    retry = RetryPolicy()
    retry.failed("d", "p", DEAD, 3)
    assert steps(retry, pair_helps=False) == [AGGREGATED]


def test_progress_makes_all_steps_available_again() -> None:
    retry, failed = RetryPolicy(progress_tokens=16), TransferFailed("x")
    retry.failed("d", "p", failed, 0)
    assert len(steps(retry)) == 3
    retry.failed("d", "p", failed, 15)
    assert steps(retry) == []
    retry.failed("d", "p", failed, 16)
    assert len(steps(retry)) == 3


def test_a_request_outlives_two_workers_and_is_not_tried_on_a_fourth() -> None:
    retry = RetryPolicy(progress_tokens=16)
    for worker in ("d", "e"):
        retry.failed(worker, "p", DEAD, 15)
        assert len(steps(retry, tokens=15)) == 3
    retry.failed("f", "p", DEAD, 15)
    assert steps(retry, tokens=15) == []
    retry.failed("g", "p", DEAD, 31)
    assert len(steps(retry)) == 3


def test_retries_are_bounded_and_moves_do_not_count() -> None:
    retry = RetryPolicy(max_retries=2)
    for _ in range(5):
        retry.continued("live_kv", MOVED, 0)
    retry.failed("d", "p", DEAD, 0)
    assert len(steps(retry)) == 2
    assert retry.is_used_up
    assert retry.done[:5] == ["live_kv:moved"] * 5


def test_the_budget_refills_and_may_be_exceeded_by_one_request() -> None:
    budget = RetryBudget(tokens_per_s=10.0, burst_s=2.0)
    budget.take("m", 5, 0.0)
    budget.take("m", 100, 0.0)
    with pytest.raises(BudgetExhausted) as caught:
        budget.take("m", 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(8.5)
    budget.take("other", 1, 0.0)
    with pytest.raises(BudgetExhausted):
        budget.take("m", 1, 8.4)
    budget.take("m", 1, 8.6)


def test_the_budget_takes_back_what_was_not_computed() -> None:
    budget = RetryBudget(tokens_per_s=10.0, burst_s=1.0)
    budget.take("m", 10, 0.0)
    budget.give_back("m", 10)
    budget.take("m", 10, 0.0)


def test_a_rate_of_zero_is_no_limit() -> None:
    budget = RetryBudget(0.0, 1.0)
    for _ in range(3):
        budget.take("m", 10**9, 0.0)
