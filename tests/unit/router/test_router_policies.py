"""The policies by name, and what tells one from another."""

from __future__ import annotations

from pdserve import config
from pdserve.types import Role, WorkerLoad
from router.placement.context import NO_CONTEXT
from router.placement.policies.by_name import POLICIES
from router.placement.values import Demand
from router.pool import Member
from tests.fakes import worker_info

DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)


def worker(worker_id: str, role: Role, busy: int = 0) -> Member:
    load = WorkerLoad(busy, busy, busy / 100, 100 - busy)
    return Member(worker_info(worker_id, role), lease_end=1.0, attached=True, load=load)


def places(policy: str, members: list[Member], turns: range) -> list[tuple[str, str]]:
    found = []
    for turn in turns:
        decision = POLICIES[policy]([m.seen() for m in members], DEMAND, turn, NO_CONTEXT)
        placement = decision.placement
        assert placement is not None
        assert placement.prefill is not None
        found.append((placement.prefill.worker_id, placement.decode.worker_id))
    return found


def test_every_policy_has_a_name_in_the_configuration() -> None:
    assert tuple(POLICIES) == config.POLICIES


def test_round_robin_takes_turns_whatever_the_load() -> None:
    members = [worker(f"p{i}", Role.PREFILL, i) for i in range(3)]
    members += [worker(f"d{i}", Role.DECODE, 4 * i) for i in range(2)]
    assert places("round_robin", members, range(6)) == [
        (f"p{i % 3}", f"d{i % 2}") for i in range(6)
    ]


def test_power_of_two_takes_the_better_of_two_and_so_never_the_worst() -> None:
    members = [worker("p", Role.PREFILL)]
    members += [worker(f"d{i}", Role.DECODE, i) for i in range(8)]
    taken = [decode for _, decode in places("power_of_two", members, range(2000))]
    assert "d7" not in taken
    # Of 28 pairs of eight, the i-th best is the better one in 7 - i.
    for i in range(7):
        assert abs(taken.count(f"d{i}") / 2000 - (7 - i) / 28) < 0.04


def test_power_of_two_draws_for_each_phase_by_itself() -> None:
    members = [worker(f"p{i}", Role.PREFILL) for i in range(4)]
    members += [worker(f"d{i}", Role.DECODE) for i in range(4)]
    assert len(set(places("power_of_two", members, range(400)))) == 16


def test_a_decision_stays_as_it_was_when_workers_change() -> None:
    member = worker("d", Role.DECODE)
    before = member.seen()
    assert member.seen() is before
    member.reserved_blocks += 5
    assert before.reserved_blocks == 0
    assert member.seen().reserved_blocks == 5
