"""The default policy: prefill goes where everybody together is predicted to wait least."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Role, WorkerLoad
from router.fleet.member import Member
from router.placement.cost import MARGIN
from router.placement.policies import MOST_PREDICTED, POLICIES
from router.placement.values import Candidate, Demand, PlacementContext, Prediction
from tests.fakes import worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping

DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)


def worker(worker_id: str, role: Role, busy: int = 0, **changes: str) -> Candidate:
    load = WorkerLoad(busy, busy, busy / 100, 100 - busy)
    info = worker_info(worker_id, role, **changes)
    return Member(info, lease_end=1.0, attached=True, load=load).seen()


P0, P1 = (worker(f"p{i}", Role.PREFILL) for i in range(2))
D0, D1 = worker("d0", Role.DECODE), worker("d1", Role.DECODE, busy=4)
A0 = worker("a0", Role.AGGREGATED, busy=6)


@dataclass
class Costs:
    """Predicts as it is told, by (prefill, decode); what is not told is unknown."""

    costs: Mapping[tuple[str | None, str], float]
    asked: list[str | None] = field(default_factory=list)

    def predict(
        self,
        demand: Demand,
        prefill: Candidate | None,
        decode: Candidate,
        cached: Mapping[str, int],
    ) -> Prediction | None:
        name = None if prefill is None else prefill.worker_id
        self.asked.append(name)
        cost = self.costs.get((name, decode.worker_id))
        if cost is None:
            return None
        return Prediction(name, decode.worker_id, cost, 0.0, cost_s=cost)


def placed(
    candidates: list[Candidate], costs: Costs, demand: Demand = DEMAND, turn: int = 0
) -> tuple[str | None, str]:
    decision = POLICIES["slo_aware"](candidates, demand, turn, PlacementContext(cost=costs))
    assert decision.policy == "slo_aware"
    assert decision.placement is not None
    prefill = decision.placement.prefill
    return (None if prefill is None else prefill.worker_id), decision.placement.decode.worker_id


@pytest.mark.parametrize(
    ("remote", "local", "expected"),
    [
        (1.0, 2.0, "p0"),
        (2.0, 1.0, None),
        # Aggregated must be better by a margin,
        (1.0, 1.0 - MARGIN / 2, "p0"),
        (1.0, 1.0 - 2 * MARGIN, None),
        # and by some milliseconds.
        (2e-4, 1e-4, "p0"),
        # Without both predictions the request is disaggregated.
        (1.0, None, "p0"),
        (None, 1.0, "p0"),
        (None, None, "p0"),
    ],
)
def test_aggregated_is_chosen_if_it_is_clearly_cheaper(
    remote: float | None, local: float | None, expected: str | None
) -> None:
    told = {("p0", "d0"): remote, (None, "d0"): local}
    costs = Costs({k: v for k, v in told.items() if v is not None})
    assert placed([P0, D0], costs) == (expected, "d0")


def test_prefill_goes_where_the_first_token_comes_soonest() -> None:
    costs = {("p0", "d0"): 3.0, ("p1", "d0"): 1.0, (None, "d0"): 2.0}
    assert placed([P0, P1, D0], Costs(costs)) == ("p1", "d0")
    # A prefill worker that nothing is known of is passed over where another is known.
    assert placed([P0, P1, D0], Costs({("p1", "d0"): 9.0})) == ("p1", "d0")


def test_without_predictions_it_places_as_its_rules_do() -> None:
    candidates = [P0, P1, D0, D1, A0]
    for turn in range(6):
        ours = POLICIES["slo_aware"](candidates, DEMAND, turn, PlacementContext(cost=Costs({})))
        rules = POLICIES["prefix_aware"](candidates, DEMAND, turn, PlacementContext())
        assert ours.placement == rules.placement


def test_a_barred_pair_and_a_strange_layout_are_not_asked_of() -> None:
    strange = worker("px", Role.PREFILL, compatibility="layout-b")
    costs = Costs({("p0", "d0"): 1.0, ("p1", "d0"): 2.0, ("px", "d0"): 0.1})
    demand = replace(DEMAND, excluded=frozenset({("p0", "d0")}))
    assert placed([P0, P1, strange, D0, worker("dx", Role.DECODE, 9, compatibility="layout-b")],
                  costs, demand) == ("p1", "d0")  # fmt: skip
    assert set(costs.asked) == {"p1", None}
    # With all pairs excluded the decode worker does both phases, whatever that costs.
    everything = replace(DEMAND, excluded=frozenset({("p0", "d0")}))
    assert placed([P0, D0], Costs({("p0", "d0"): 1.0}), everything) == (None, "d0")


def test_only_some_prefill_workers_are_asked_of_in_a_large_pool() -> None:
    many = [worker(f"p{i}", Role.PREFILL, busy=i) for i in range(40)]
    costs = Costs({(c.worker_id, "d0"): 1.0 for c in many})
    placed([*many, D0], costs)
    assert len(costs.asked) == MOST_PREDICTED + 1


def test_a_single_token_and_an_aggregated_worker_are_placed_by_the_rules() -> None:
    costs = Costs({(None, "d0"): 0.0, ("p0", "d0"): 0.0})
    assert placed([P0, D0], costs, replace(DEMAND, prefill_only=True)) == (None, "p0")
    assert placed([A0], Costs({(None, "a0"): 1.0})) == (None, "a0")
    assert costs.asked == []
