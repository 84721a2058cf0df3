"""The log of decisions: what it keeps, what it gives up, and what it says of a real request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from pdserve.config import QueueConfig
from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import FinishReason, Role
from router.attempt.placer import Charge
from router.fleet.member import Member
from router.placement.decisions import MAX_OF_ONE_REQUEST, DecisionLog
from router.placement.policies import least_loaded
from router.placement.values import NO_CONTEXT, Demand
from tests.support.router_stack import PROMPT, ScriptedWorker, request, running_stack, worker_info

if TYPE_CHECKING:
    from router.placement.values import Decision

LENGTH = FinishReason.LENGTH


def decide(request_id: str, *, full: bool = False) -> Decision:
    """Return a decision over two or more workers; with `full` it must wait."""
    workers = [
        Member(worker_info(f"{role[0]}0", role), lease_end=1.0, attached=True)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    if full:
        for worker in workers:
            Charge(worker, kv_tokens=1600)
    demand = Demand("demo", 100, 150, request_id=request_id, token_ids=tuple(range(100)))
    return least_loaded([w.snapshot() for w in workers], demand, 0, NO_CONTEXT)


def test_the_requests_with_the_oldest_decisions_go_first() -> None:
    log = DecisionLog(2)
    for request_id in ("a", "b", "a", "c"):
        log.record(decide(request_id), 1.0)
    assert [bool(log.of(x)) for x in ("a", "b", "c")] == [True, False, True]
    none = DecisionLog(0)
    none.record(decide("a"), 1.0)
    assert none.of("a") == []


def test_the_decisions_of_one_request_are_bounded_and_without_its_prompt() -> None:
    log = DecisionLog(3)
    for at in range(MAX_OF_ONE_REQUEST + 3):
        log.record(decide("a"), float(at))
    found = log.of("a")
    assert [x.unix_time_s for x in found] == [3.0 + i for i in range(MAX_OF_ONE_REQUEST)]
    assert found[0].decision.demand == structs.replace(decide("a").demand, token_ids=())


def test_a_request_that_waits_is_one_decision_until_it_is_placed() -> None:
    log = DecisionLog(10)
    for at in range(4):
        log.record(decide("a", full=True), float(at))
    log.record(decide("a"), 4.0)
    assert [(x.waits, x.unix_time_s) for x in log.of("a")] == [(True, 3.0), (False, 4.0)]


async def test_a_retried_request_records_the_reason() -> None:
    workers = [ScriptedWorker(name, Role.PREFILL) for name in ("p1", "p2")]
    decode = ScriptedWorker("d", Role.DECODE)
    async with (
        running_stack(*workers, decode, decisions_kept=10) as stack,
        stack.ask(request(request_id="chatcmpl-again")) as answer,
    ):
        await decode.submitted()
        workers[0].fail(await workers[0].submitted(), WorkerFailed("its engine died"))
        second, to_decode = await workers[1].submitted(), await decode.submitted()
        workers[1].send(second, 7, finish=LENGTH)
        decode.send(to_decode, 8, finish=LENGTH)
        await answer.rest()
    log = stack.requests.decisions
    found = log.of("again")  # as its client calls it
    assert found == log.of("chatcmpl-again")
    assert log.of("gain") == []
    assert [x.cause for x in found] == ["", "pair: its engine died"]
    chosen = [x.decision.placement for x in found]
    assert [x and x.prefill and x.prefill.worker_id for x in chosen] == ["p1", "p2"]
    assert [x.decision.turn for x in found] == [0, 1]
    assert found[1].decision.demand.avoid == {"p1"}
    assert found[0].decision.candidates[0].outstanding_tokens == 0
    assert found[0].decision.demand.prompt_tokens == len(PROMPT)


async def test_a_refused_request_records_the_reason() -> None:
    prefill = ScriptedWorker("p", Role.PREFILL)
    async with running_stack(
        prefill, decisions_kept=10, queue=QueueConfig(timeout_s=0.01)
    ) as stack:
        member = stack.fleet.members["p"]
        stack.fleet.engine_died(member)
        async with stack.ask(request(request_id="refused")) as answer:
            with pytest.raises(Unavailable):
                await answer.rest()
    found = stack.requests.decisions.of("refused")
    assert {x.refused for x in found} == {
        "no prefill worker and no decode worker is ready for model demo: p is draining"
    }
