"""What follows an attempt: every order of events that the performer may report."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.config import QueueConfig, RetryConfig
from pdserve.errors import (
    BudgetExhausted,
    DeadlineExceeded,
    InvalidRequest,
    PdserveError,
    PoisonRequest,
    TransferCorrupted,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from router.attempt.handoff import MOVED, Failed, Side
from router.attempt.recovery import (
    GENERATE_STEPS,
    Complete,
    Confirm,
    Constraints,
    Facts,
    GiveUp,
    Ping,
    Recovery,
    RecoveryLimits,
    ReserveWorkers,
    RunAttempt,
    Wait,
)
from router.attempt.suspects import Death, Suspicion

if TYPE_CHECKING:
    from router.attempt.recovery import Decision
    from router.fleet.member import Member

PAIR, AGGREGATED = GENERATE_STEPS
DEAD = Failed(Side.DECODE, WorkerFailed("worker d is gone"))
LIMITS = RecoveryLimits(QueueConfig(timeout_s=10.0), RetryConfig())
WORKERS = ["p", "d"]


class Worker:
    """A worker that died. Each is of no data-parallel group."""

    attached = has_left = False
    lost = True


def death() -> Death:
    member = cast("Member", Worker())
    return Death(member, said_so=True, ranks=(member,))


def recovery(suspicion: Suspicion | None = None, deadline: float = 100.0) -> Recovery:
    return Recovery(LIMITS, suspicion or Suspicion(), max_tokens=64, deadline=deadline)


def test_an_answer_that_is_complete_already_needs_no_worker() -> None:
    decision = recovery().start(64)
    assert isinstance(decision, Complete)


def test_a_parallel_answer_without_workers_looks_for_them() -> None:
    decision = recovery().start_without_workers(Facts(0.0, 0))
    assert decision == ReserveWorkers(Constraints(PAIR))


def test_a_request_at_fault_is_not_retried() -> None:
    error = InvalidRequest("no such grammar")
    decision = recovery().failed(Failed(Side.DECODE, error), WORKERS, None, Facts(0.0, 3))
    assert decision == GiveUp(error)


@pytest.mark.parametrize(
    ("error", "side", "avoided", "excluded"),
    [
        (WorkerFailed("x"), Side.DECODE, "d", {"d"}),
        (WorkerFailed("x"), Side.PREFILL, "p", {"p"}),
        (TransferFailed("x"), Side.DECODE, "d", set()),
        # Either may have damaged it; the producer is easier to replace.
        (TransferCorrupted("x"), Side.DECODE, "p", set()),
    ],
)
def test_the_next_attempt_avoids_the_worker_at_fault(
    error: PdserveError, side: Side, avoided: str, excluded: set[str]
) -> None:
    decision = recovery().failed(Failed(side, error), WORKERS, ("p", "d"), Facts(0.0, 3))
    assert isinstance(decision, ReserveWorkers)
    assert decision.constraints.avoid == {avoided}
    assert decision.constraints.without == excluded


def test_an_answer_leaves_for_another_region_once_nothing_here_can_continue_it() -> None:
    machine, nobody = recovery(), Unavailable("nobody")
    facts = Facts(0.0, 3, is_anybody_ready=False, can_leave=True)
    assert isinstance(machine.failed(DEAD, WORKERS, None, facts), ReserveWorkers)
    assert isinstance(machine.refused(nobody, facts), ReserveWorkers)
    decision = machine.refused(nobody, facts)
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, Unavailable)


def test_without_workers_it_waits_and_then_gives_up_with_a_retry_after() -> None:
    machine = recovery()
    facts = Facts(0.0, 3, is_anybody_ready=False)
    assert isinstance(machine.failed(DEAD, WORKERS, None, facts), ReserveWorkers)
    assert isinstance(machine.refused(Unavailable("nobody"), facts), ReserveWorkers)
    assert machine.refused(Unavailable("nobody"), facts) == Wait(10.0)
    later = facts._replace(now=9.0)
    assert isinstance(machine.waited(later), ReserveWorkers)
    machine.refused(Unavailable("nobody"), later)
    assert machine.refused(Unavailable("nobody"), later) == Wait(10.0)
    decision = machine.waited(facts._replace(now=10.0))
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, Unavailable)
    assert decision.error.retry_after_s > 0


def test_an_exhausted_budget_ends_the_search() -> None:
    machine, error = recovery(), BudgetExhausted("used up")
    machine.failed(DEAD, WORKERS, None, Facts(0.0, 3))
    assert machine.refused(error, Facts(0.0, 3)) == GiveUp(error)


def test_a_suspect_is_sent_only_to_workers_that_answer() -> None:
    machine, facts = recovery(), Facts(0.0, 3)
    machine.died(death(), 3)
    assert isinstance(machine.failed(DEAD, WORKERS, None, facts), ReserveWorkers)
    assert machine.reserved(facts) == Ping()
    decision = machine.pinged("e", facts)
    assert isinstance(decision, ReserveWorkers)
    assert "e" in decision.constraints.without
    assert decision.constraints.step is PAIR, "nothing was sent, so no step is used up"
    assert machine.pinged(None, facts) == RunAttempt()
    assert machine.reserved(facts._replace(tokens=3 + 16)) == RunAttempt(), "it has advanced"


def test_two_deaths_are_confirmed_before_the_request_is_refused() -> None:
    machine, facts = recovery(), Facts(0.0, 3)
    for _ in range(2):
        machine.died(death(), 3)
    assert machine.failed(DEAD, WORKERS, None, facts) == Confirm()
    assert isinstance(machine.confirmed(1, facts), ReserveWorkers)
    decision = machine.confirmed(2, facts)
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, PoisonRequest)


def test_a_suspect_waits_for_its_turn_until_its_deadline() -> None:
    machine = recovery(deadline=50.0)
    crowded = Facts(0.0, 3, is_crowded=True)
    machine.died(death(), 3)
    machine.failed(DEAD, WORKERS, None, crowded)
    machine.refused(Unavailable("x"), crowded)
    machine.refused(Unavailable("x"), crowded)
    assert isinstance(machine.waited(crowded._replace(now=20.0)), ReserveWorkers)
    decision = machine.waited(crowded._replace(now=50.0))
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, DeadlineExceeded)


@pytest.mark.parametrize("seed", range(20))
def test_every_search_ends_and_keeps_its_rules(seed: int) -> None:
    """A performer that reports anything, in any order that the decisions allow: no attempt runs
    beyond the limits, and a suspect never runs on workers that were not pinged."""
    rng = random.Random(seed)
    for _ in range(100):
        explore(rng)


def explore(rng: random.Random) -> None:
    suspicion, deadline = Suspicion(), rng.choice([30.0, math.inf])
    machine = Recovery(LIMITS, suspicion, max_tokens=64, deadline=deadline)
    now, tokens, pinged, attempts = 0.0, 0, True, 0

    def facts() -> Facts:
        is_ready, is_crowded = rng.random() < 0.5, rng.random() < 0.5
        return Facts(now, tokens, is_ready, is_crowded)

    has_workers = rng.random() < 0.5
    decision: Decision = machine.start(0) if has_workers else machine.start_without_workers(facts())
    while not isinstance(decision, Complete | GiveUp):
        match decision:
            case RunAttempt():
                assert pinged or not machine.is_suspect(tokens)
                pinged = False
                attempts += 1
                tokens = min(64, tokens + rng.choice([0, 1, 20]))
                if rng.random() < 0.5:
                    machine.died(death(), tokens)
                error = rng.choice([DEAD.error, TransferFailed("x")])
                decision = machine.failed(Failed(Side.DECODE, error), WORKERS, None, facts())
            case ReserveWorkers():
                pinged = False
                if rng.random() < 0.5:
                    decision = machine.reserved(facts())
                    if not isinstance(decision, Ping):
                        machine.continued("pair", tokens)
                else:
                    decision = machine.refused(Unavailable("nobody"), facts())
            case Ping():
                silent = rng.choice([None, "e"])
                pinged = silent is None
                decision = machine.pinged(silent, facts())
                if pinged:
                    machine.continued("pair", tokens)
            case Confirm():
                decision = machine.confirmed(rng.randrange(3), facts())
            case Wait(until):
                assert until <= deadline
                now += rng.choice([5.0, 1.0, 0.1])
                decision = machine.waited(facts())
        # The first search of a parallel answer is no retry.
        retries = [x for x in machine.retries if not x.endswith(MOVED)]
        assert len(retries) <= LIMITS.max_retries
    assert attempts <= LIMITS.max_retries + 1
