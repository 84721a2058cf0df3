"""The policies by name, and what tells one from another."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.config import RouterConfig
from pdserve.types import Role, WorkerLoad
from router.fleet.member import Member
from router.placement.policies import POLICIES
from router.placement.scorers import MOST_SCORED
from router.placement.values import NO_CONTEXT, Candidate, Demand, PlacementContext
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
    for name in POLICIES:
        assert msgspec.convert({"policy": name}, RouterConfig).policy == name


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


def large_pool(count: int) -> list[Candidate]:
    """As many of each phase; the later ones are busier."""
    return [
        worker(f"{role[0]}{i}", role, i * 8 // count).seen()
        for i in range(count)
        for role in (Role.PREFILL, Role.DECODE)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_scored_does_not_grow_with_the_pool(name: str) -> None:
    candidates = large_pool(300)
    chosen = set()
    for turn in range(150):
        decision = POLICIES[name](candidates, DEMAND, turn, NO_CONTEXT)
        assert decision.placement is not None
        assert decision.prefill is not None
        assert decision.decode is not None
        for board in (decision.prefill, decision.decode):
            assert 1 <= len(board.candidates) <= MOST_SCORED
        chosen.add(decision.placement.decode)
    assert len(chosen) > 30, "one draw is not like another"


def test_the_best_of_many_drawn_is_among_the_best_of_all() -> None:
    candidates = large_pool(300)
    for turn in range(50):
        decision = POLICIES["least_loaded"](candidates, DEMAND, turn, NO_CONTEXT)
        assert decision.placement is not None
        load = decision.placement.decode.load
        assert load is not None
        assert load.num_running_reqs == 0, "an eighth of all: missed once in 5,000 draws"


def test_who_has_the_prompt_is_drawn_whoever_else_is() -> None:
    class Cached:
        def cached_tokens(self, _demand: Demand) -> dict[str, int]:
            return {"p17": 96, **{f"p{i}": 16 for i in range(100, 200)}}

    candidates = large_pool(300)
    for turn in range(50):
        decision = POLICIES["prefix_aware"](candidates, DEMAND, turn, PlacementContext(Cached()))
        assert decision.placement is not None
        assert decision.placement.prefill is not None
        assert decision.placement.prefill.worker_id == "p17"
