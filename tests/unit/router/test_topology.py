"""Labels of where workers run. Near pairs, and workers near the router, are preferred until they
are overloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from pdserve.config import SloConfig
from pdserve.types import Receipt, Role, Usage, WorkerLoad
from router.fleet.registry import Fleet
from router.placement.cost import MIN_SAMPLES, CostModel
from router.placement.decisions import DecisionLog, explained
from router.placement.policies import POLICIES
from router.placement.topology import PRIOR_S, distance
from router.placement.values import Demand, PlacementContext
from tests.support.placement import FULL, IDLE, decide, place, seen, worker
from tests.support.router_stack import worker_info

if TYPE_CHECKING:
    from router.fleet.member import Member

HERE, THERE = {"region": "eu", "zone": "a"}, {"region": "us", "zone": "a"}
DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)


def at(name: str, where: dict[str, str], load: WorkerLoad = IDLE, **state: object) -> Member:
    """Return a worker with these labels, as seen by a router in HERE."""
    member = worker(name, load, router_distance=distance(HERE, where), **state)
    member.info = replace(member.info, topology=where)
    return member


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        (HERE, THERE, "region"),
        (HERE, HERE | {"zone": "b", "host": "h"}, "zone"),
        ({"host": "h1"}, HERE | {"host": "h2"}, "host"),
        (HERE, {"region": "eu"}, ""),
        (HERE, {}, ""),
    ],
)
def test_two_are_as_far_apart_as_the_farthest_level_at_which_they_differ(
    one: dict[str, str], other: dict[str, str], level: str
) -> None:
    assert distance(one, other) == distance(other, one) == level
    assert PRIOR_S["host"] < PRIOR_S["zone"] < PRIOR_S["region"]


def test_workers_where_the_router_is_are_preferred_in_every_turn() -> None:
    members = [at(f"{role}{n}", [HERE, THERE][n]) for role in "pd" for n in (0, 1)]
    for policy in POLICIES:
        if policy not in ("round_robin", "always_aggregated"):
            assert {place(members, policy, turn=turn) for turn in range(4)} == {("p0", "d0")}
    single = structs.replace(DEMAND, prefill_only=True)
    assert {place(members, turn=turn, demand=single) for turn in range(4)} == {(None, "p0")}


def test_a_pair_far_away_is_one_pair_and_taken_when_here_is_no_room() -> None:
    members = [at("p0", HERE), at("p1", THERE), at("d1", THERE), at("d0", HERE, FULL)]
    assert place(members) == ("p1", "d1")


def test_a_prompt_goes_far_away_when_the_prefill_worker_here_has_a_queue() -> None:
    members = [at("p0", HERE), at("p1", THERE), at("d0", HERE), at("d1", THERE)]
    members[0].placed.outstanding_tokens = 40
    assert place(members) == ("p0", "d0")
    members[0].placed.outstanding_tokens = 4000
    assert place(members) == ("p1", "d1")


def test_without_labels_equal_workers_take_turns() -> None:
    members = [worker(name, IDLE) for name in ("p0", "p1", "d0", "d1")]
    assert {place(members, turn=turn) for turn in range(4)} == {("p0", "d0"), ("p1", "d1")}


def test_the_decision_says_where_workers_are_and_what_it_counted() -> None:
    decision = decide([at("p0", HERE), at("p1", THERE), at("d0", HERE)])
    log = DecisionLog(1)
    log.record(decision, 0.0)
    (told,) = explained(log.of("")).decisions
    far = next(c for c in told.candidates if c.worker_id == "p1")
    assert dict(far.topology) == THERE
    assert next((s.scorer, s.weight) for s in far.scores) == ("local", 0.3)


async def test_the_distance_of_a_pair_is_assumed_until_it_was_measured() -> None:
    fleet = Fleet(topology=HERE)
    costs = CostModel(fleet, SloConfig(), lambda: 0.0)
    for name, role, where in (
        ("p0", Role.PREFILL, HERE),
        ("p1", Role.PREFILL, THERE),
        ("d0", Role.DECODE, HERE),
        ("d1", Role.DECODE, THERE),
    ):
        fleet.register(worker_info(name, role, topology=where))
        fleet.members[name].attached = True
    p0, p1, d0, d1 = fleet.candidates("demo")
    assert (p0.router_distance, p1.router_distance) == ("", "region")
    assert costs.distance_s("demo", p1, d0) == PRIOR_S["region"]
    receipt = Receipt(
        prefill_worker="p1", decode_worker="d0", transport="tcp", exposed_transfer_s=0.01
    )
    for _ in range(int(MIN_SAMPLES)):
        costs.answered("demo", Usage(100, 20), receipt, ttft_s=0.1, e2e_s=0.4)
    # What one pair measured counts for others as far apart, and for none that are near.
    assert costs.distance_s("demo", p0, d1) == pytest.approx(0.01)
    assert costs.distance_s("demo", p0, d0) == 0.0
    context = PlacementContext(None, costs)
    members = [fleet.members[name] for name in ("p1", "d0", "d1")]
    decision = POLICIES["least_loaded"](seen(members), DEMAND, 0, context)
    assert decision.placement is not None
    assert decision.placement.decode.worker_id == "d0"  # near the router, and KV comes fast
