"""What the next attempt may use after a failure, and how much may be computed again."""

from __future__ import annotations

import pytest

from pdserve.errors import (
    BudgetExhausted,
    Overloaded,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from router.attempt.handoff import MOVED
from router.attempt.recovery import GENERATE_STEPS, Constraints, RetryPolicy, RetryStep
from router.attempt.retry_budget import RetryBudget

PAIR, AGGREGATED = GENERATE_STEPS
DEAD = WorkerFailed("gone")


def steps(retry: RetryPolicy, *, tokens: int = 0, pair_helps: bool = True) -> list[RetryStep]:
    """Take all steps that are left."""
    found = []
    while (constraints := retry.next(pair_helps=pair_helps)) is not None:
        retry.continued(constraints.step, "x", tokens)
        found.append(constraints.step)
    return found


@pytest.mark.parametrize("error", [DEAD, Unavailable("x"), Overloaded("x"), TransferFailed("x")])
def test_a_pair_is_tried_and_then_one_worker(error: PdserveError) -> None:
    retry = RetryPolicy()
    retry.failed("d", error, 0)
    assert steps(retry) == [PAIR, AGGREGATED]
    assert len(retry.done) == 2


def test_a_worker_that_failed_takes_no_part_and_one_with_bad_luck_may() -> None:
    retry = RetryPolicy()
    retry.failed("d", DEAD, 3)
    retry.failed("p", TransferFailed("x"), 3)
    failed, both = frozenset({"d"}), frozenset({"d", "p"})
    assert retry.next(pair_helps=True) == Constraints(PAIR, failed, both, failed)
    assert retry.next(pair_helps=True) == Constraints(AGGREGATED, avoid=both, failed=failed)


def test_for_the_last_token_a_pair_does_not_help() -> None:
    retry = RetryPolicy()
    retry.failed("d", DEAD, 3)
    assert steps(retry, pair_helps=False) == [AGGREGATED]


def test_progress_makes_all_steps_available_again() -> None:
    retry, failed = RetryPolicy(progress_tokens=16), TransferFailed("x")
    retry.failed("d", failed, 0)
    assert len(steps(retry)) == 2
    retry.failed("d", failed, 15)
    assert steps(retry) == []
    retry.failed("d", failed, 16)
    assert len(steps(retry)) == 2


def test_after_the_failure_of_a_worker_all_steps_are_available_again() -> None:
    retry = RetryPolicy(progress_tokens=16)
    for worker in ("d", "e", "f"):
        retry.failed(worker, DEAD, 15)
        assert len(steps(retry, tokens=15)) == 2


def test_retries_are_bounded_and_moves_do_not_count() -> None:
    retry = RetryPolicy(max_retries=2)
    for _ in range(5):
        retry.continued("live_kv", MOVED, 0)
    retry.failed("d", DEAD, 0)
    assert len(steps(retry)) == 2
    assert retry.is_used_up
    assert retry.done[:5] == ["live_kv:moved"] * 5


def take(budget: RetryBudget, model: str, tokens: int, now: float) -> None:
    with budget.taking(model, tokens, now):
        pass


def test_the_budget_refills_and_may_be_exceeded_by_one_request() -> None:
    budget = RetryBudget(tokens_per_s=10.0, burst_s=2.0)
    take(budget, "m", 5, 0.0)
    take(budget, "m", 100, 0.0)
    with pytest.raises(BudgetExhausted) as caught:
        take(budget, "m", 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(8.5)
    take(budget, "other", 1, 0.0)
    with pytest.raises(BudgetExhausted):
        take(budget, "m", 1, 8.4)
    take(budget, "m", 1, 8.6)


def test_the_budget_takes_nothing_for_a_retry_without_workers() -> None:
    budget = RetryBudget(tokens_per_s=10.0, burst_s=1.0)
    with pytest.raises(Unavailable), budget.taking("m", 10, 0.0):
        raise Unavailable("no worker is ready")
    take(budget, "m", 10, 0.0)


def test_a_rate_of_zero_is_no_limit() -> None:
    budget = RetryBudget(0.0, 1.0)
    for _ in range(3):
        take(budget, "m", 10**9, 0.0)
