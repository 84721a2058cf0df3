"""The ladder and its budget: which way to go on, and when to give up."""

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
from router.ladder import Failure, Ladder, LadderLimits, Rung, Step
from router.retry_budget import RetryBudget

SAME, OTHER, ONE = Step.SAME_PREFILL, Step.OTHER_PREFILL, Step.ONE_WORKER
DEAD = WorkerFailed("gone")


def climb_all(ladder: Ladder, *, tokens: int = 0, pair_helps: bool = True) -> list[Step]:
    """The rungs that are left, each taken."""
    steps = []
    while (rung := ladder.climb("p", pair_helps=pair_helps)) is not None:
        ladder.took(rung.step, "x", tokens)
        steps.append(rung.step)
    return steps


@pytest.mark.parametrize(
    ("worker", "error", "steps"),
    [
        pytest.param("p", DEAD, [OTHER, ONE], id="a prefill worker that died"),
        pytest.param("p", Unavailable("x"), [OTHER, ONE], id="one that drains"),
        pytest.param("p", Overloaded("x"), [SAME, OTHER, ONE], id="one that was full"),
        pytest.param("d", DEAD, [SAME, OTHER, ONE], id="a decode worker that died"),
        pytest.param("d", TransferFailed("x"), [SAME, OTHER, ONE], id="a link that broke"),
        pytest.param("p", TransferCorrupted("x"), [OTHER, ONE], id="KV that came damaged"),
    ],
)
def test_what_failed_says_where_the_ladder_begins(
    worker: str, error: PdserveError, steps: list[Step]
) -> None:
    ladder = Ladder()
    ladder.failed(Failure(worker, "p", error), 0)
    assert climb_all(ladder) == steps
    assert len(ladder.done) == len(steps)


def test_who_failed_takes_no_part_and_who_had_bad_luck_may() -> None:
    ladder = Ladder()
    ladder.failed(Failure("d", "p", DEAD), 3)
    failed, both = frozenset({"d"}), frozenset({"d", "p"})
    assert ladder.climb("p", pair_helps=True) == Rung(SAME, "p", failed, failed)
    ladder.failed(Failure("p", "p", TransferFailed("x")), 3)
    assert ladder.climb("p", pair_helps=True) == Rung(OTHER, "", failed, both)
    assert ladder.climb("p", pair_helps=True) == Rung(ONE, avoid=both)


def test_a_pair_is_no_help_for_a_single_token() -> None:
    ladder = Ladder()
    ladder.failed(Failure("d", "p", DEAD), 7)
    assert climb_all(ladder, pair_helps=False) == [ONE]


def test_progress_starts_the_ladder_anew_and_the_count_bounds_it() -> None:
    ladder = Ladder(LadderLimits(max_fallbacks=5, progress_tokens=10))
    for tokens in range(0, 50, 10):
        ladder.failed(Failure(f"d{tokens}", "p", DEAD), tokens)
        rung = ladder.climb("p", pair_helps=True)
        assert rung is not None
        assert (rung.step, rung.without) == (SAME, {f"d{tokens}"})
        ladder.took(rung.step, "worker_failed", tokens)
    ladder.failed(Failure("d", "p", DEAD), 50)
    assert ladder.climb("p", pair_helps=True) is None


def test_without_progress_each_rung_is_tried_once() -> None:
    ladder = Ladder(LadderLimits(progress_tokens=10))
    steps = []
    for tokens in range(0, 40, 9):
        ladder.failed(Failure(f"d{tokens}", "p", DEAD), tokens)
        rung = ladder.climb("p", pair_helps=True)
        if rung is None:
            break
        ladder.took(rung.step, "worker_failed", tokens)
        steps.append(rung.step)
    assert steps == [SAME, OTHER, ONE]


# -- the budget


def test_a_burst_is_served_and_then_the_rate_holds() -> None:
    budget = RetryBudget(tokens_per_s=100, burst_s=10)
    for _ in range(4):
        budget.take("m", 250, 0.0)
    with pytest.raises(BudgetExhausted, match=r"model m \(100 tokens/s\)"):
        budget.take("m", 1, 0.0)
    budget.take("m", 250, 0.5)  # 50 are there, so it is in debt
    with pytest.raises(BudgetExhausted) as caught:
        budget.take("m", 1, 1.0)
    assert caught.value.retry_after_s == pytest.approx(1.5)
    budget.take("m", 1, 2.6)


def test_models_have_budgets_of_their_own_and_what_is_given_back_counts() -> None:
    budget = RetryBudget(tokens_per_s=1, burst_s=10)
    budget.take("m", 10, 0.0)
    assert (budget.left("m", 0.0), budget.left("other", 0.0)) == (0, 10)
    budget.give_back("m", 10)
    assert budget.left("m", 0.0) == 10
    assert budget.left("m", 1e6) == 10, "no more than the burst"


def test_a_rate_of_zero_is_no_bound() -> None:
    budget = RetryBudget(tokens_per_s=0, burst_s=1)
    for _ in range(1000):
        budget.take("m", 1 << 20, 0.0)
