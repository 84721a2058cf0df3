"""The log of decisions: what it keeps, what it gives up, and what it says of a real request."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import FinishReason, Role
from router.admission import AdmissionLimits
from router.decisions import MAX_OF_ONE_REQUEST, DecisionLog
from router.fleet.member import Member
from router.placement.policies import least_loaded
from router.placement.values import NO_CONTEXT, Demand, Prediction
from router.placer import Charge
from tests.fakes import ScriptedWorker, running_stack, worker_info
from tests.unit.router.asking import PROMPT, request

if TYPE_CHECKING:
    from router.placement.values import Decision

LENGTH = FinishReason.LENGTH


def decide(request_id: str, *, full: bool = False, pairs: int = 1) -> Decision:
    """A decision over a pair of workers, or more; with `full` it must wait."""
    workers = [
        Member(worker_info(f"{role[0]}{i}", role), lease_end=1.0, attached=True)
        for i in range(pairs)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    if full:
        for worker in workers:
            Charge(worker, kv_tokens=1600)
    demand = Demand("demo", 100, 150, request_id=request_id, token_ids=tuple(range(100)))
    return least_loaded([w.seen() for w in workers], demand, 0, NO_CONTEXT)


def ids(log: DecisionLog) -> list[str]:
    return [request.request_id for request in log.all()]


def test_the_requests_not_heard_of_for_longest_are_given_up() -> None:
    log = DecisionLog(3)
    for request_id in ("a", "b", "c", "a", "d"):
        log.record(decide(request_id), 1.0)
    assert len(log) == 3
    assert ids(log) == ["a", "d"], "b and c had been silent for longer than a"
    assert log.of("b") is None


def test_one_request_alone_keeps_its_last_decisions() -> None:
    log = DecisionLog(3)
    for at in range(5):
        log.record(decide("a"), float(at))
    found = log.of("a")
    assert found is not None
    assert [x.unix_time_s for x in found.decisions] == [2.0, 3.0, 4.0]
    assert found.forgotten == 2
    log = DecisionLog(1000)
    for at in range(MAX_OF_ONE_REQUEST + 3):
        log.record(decide("a"), float(at))
    assert len(log) == MAX_OF_ONE_REQUEST


def test_the_candidates_in_it_are_bounded_too() -> None:
    log = DecisionLog(1000, max_candidates=50)
    for index in range(9):
        log.record(decide(f"r{index}", pairs=10), 1.0)
    assert ids(log) == ["r7", "r8"]
    log.record(decide("huge", pairs=26), 1.0)
    assert len(log) == 0, "one decision over more workers than it may hold is not kept"
    log.record(decide("small"), 1.0)
    assert ids(log) == ["small"]


def test_none_are_kept_where_none_are_asked_for() -> None:
    log = DecisionLog(0)
    log.record(decide("a"), 1.0)
    assert ids(log) == []


def test_a_prompt_is_not_kept() -> None:
    log = DecisionLog(3)
    decided = replace(decide("a"), predictions=(Prediction("p", "d", 0.1, 0.0),), asked_prefix=True)
    avoid, excluded = frozenset({"a"}), frozenset({("p", "d")})
    demand = replace(decided.demand, avoid=avoid, excluded=excluded, children=2, child_tokens=16)
    log.record(replace(decided, demand=demand), 1.0)
    (found,) = log.all()
    kept = found.decisions[0].decision
    assert kept.demand == replace(demand, token_ids=())
    rest = [f.name for f in fields(kept) if f.name != "demand"]
    assert [getattr(kept, x) for x in rest] == [getattr(decided, x) for x in rest]


def test_a_request_that_waits_is_one_decision_until_it_is_placed() -> None:
    log = DecisionLog(10)
    for at in range(4):
        log.record(decide("a", full=True), float(at))
    log.record(decide("a"), 4.0)
    (found,) = log.all()
    assert [(x.waits, x.unix_time_s, x.tried_before) for x in found.decisions] == [
        (True, 3.0, 3),
        (False, 4.0, 0),
    ]
    assert len(log) == 2


def test_what_is_read_does_not_change_while_it_is_written_out() -> None:
    log = DecisionLog(10)
    log.record(decide("a"), 1.0)
    before = log.of("a")
    log.record(decide("a"), 2.0)
    assert before is not None
    assert len(before.decisions) == 1


async def test_a_request_that_is_placed_again_says_why() -> None:
    log = DecisionLog(10)
    workers = [ScriptedWorker(name, Role.PREFILL) for name in ("p1", "p2")]
    decode = ScriptedWorker("d", Role.DECODE)
    async with (
        running_stack(*workers, decode, decisions=log) as stack,
        stack.ask(request(request_id="again")) as answer,
    ):
        await decode.submitted()
        workers[0].fail(await workers[0].submitted(), WorkerFailed("its engine died"))
        second, to_decode = await workers[1].submitted(), await decode.submitted()
        workers[1].send(second, 7, finish=LENGTH)
        decode.send(to_decode, 8, finish=LENGTH)
        await answer.rest()
    found = log.of("again")
    assert found is not None
    assert [x.cause for x in found.decisions] == ["", "other_prefill: its engine died"]
    chosen = [x.decision.placement for x in found.decisions]
    assert [x and x.prefill and x.prefill.worker_id for x in chosen] == ["p1", "p2"]
    assert [x.decision.turn for x in found.decisions] == [0, 1]
    assert found.decisions[1].decision.demand.avoid == {"p1"}
    assert found.decisions[0].decision.candidates[0].outstanding_tokens == 0
    assert found.decisions[0].decision.demand.prompt_tokens == len(PROMPT)


async def test_a_request_that_is_refused_says_why() -> None:
    log = DecisionLog(10)
    limits = AdmissionLimits(queue_timeout_s=0.01)
    prefill = ScriptedWorker("p", Role.PREFILL)
    async with running_stack(prefill, decisions=log, limits=limits) as stack:
        stack.fleet.pool.members["p"].draining = True
        async with stack.ask(request(request_id="refused")) as answer:
            with pytest.raises(Unavailable):
                await answer.rest()
    found = log.of("refused")
    assert found is not None
    assert {x.refused for x in found.decisions} == {
        "no prefill worker and no decode worker is ready for model demo: p is draining"
    }
