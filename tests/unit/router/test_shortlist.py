"""Placements on a few workers that were drawn, against those on all workers."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdserve.errors import Unavailable
from pdserve.types import Adapter, Role, WorkerLoad
from router.attempt.placer import Placer, Reservation
from router.attempt.recovery import Constraints, RetryStep
from router.fleet import shortlist
from router.fleet.registry import Fleet
from router.placement.decisions import DecisionLog, explained
from router.placement.policies import POLICIES
from router.placement.revisions import RevisionShares
from router.placement.values import Demand, PlacementContext
from tests.support.placement import ROLES, FixedLookups
from tests.support.router_stack import worker_info

DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150, request_id="r")
MOST = 3 * (shortlist.MOST_DRAWN + shortlist.MOST_CACHED)


def fleet_of(*workers: str, **changes: Any) -> Fleet:
    fleet = Fleet(lease_s=1.0, clock=lambda: 0.0)
    for name in workers:
        fleet.register(worker_info(name, ROLES[name[0]], **changes))
        fleet.members[name].attached = True
    return fleet


def placer_of(fleet: Fleet, policy: str, known: FixedLookups | None = None) -> Placer:
    context = PlacementContext(known)
    return Placer(fleet, POLICIES[policy], context, log=DecisionLog(1), prefill_chunks_ahead=2)


def placed(placer: Placer, demand: Demand) -> Reservation | str:
    """Return the reservation, or the name of the error."""
    try:
        return placer.reserve(demand)
    except Unavailable as error:
        return type(error).__name__


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, Demand, dict[str, int]]:
    """Return a fleet, a demand, and cached tokens of its workers. Some fleets have room on a single
    worker."""
    sizes = {x: draw(st.sampled_from([0, 1, 9, 40])) for x in "pda"}
    fleet = fleet_of(*(f"{role}{i}" for role, size in sizes.items() for i in range(size)))
    chance = draw(st.randoms(use_true_random=False))
    shares = {x: draw(st.sampled_from([0.0, 0.5, 0.98, 1.0])) for x in ("away", "full", "busy")}
    for m in fleet.members.values():
        m.attached = chance.random() >= shares["away"]
        m.info = replace(m.info, limits=replace(m.info.limits, max_num_batched_tokens=64))
        m.placed.reserved_blocks = 100 * (chance.random() < shares["full"])
        m.placed.outstanding_tokens = 200 * (chance.random() < shares["busy"])
        m.report_load(WorkerLoad(0, chance.randrange(8), 0.0, chance.randrange(100)))
    demand = structs.replace(DEMAND, prefill_only=draw(st.booleans()))
    names = chance.sample(sorted(fleet.members), min(len(fleet.members), 30))
    return fleet, demand, {x: chance.randrange(1, 100) for x in names}


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "slo_aware", "round_robin"])
@settings(max_examples=40, deadline=None)
@given(fleets())
def test_a_request_is_placed_or_waits_as_if_all_workers_were_compared(
    policy: str, made: tuple[Fleet, Demand, dict[str, int]]
) -> None:
    fleet, demand, cached = made
    known = FixedLookups(cached)
    drawn = placed(placer_of(fleet, policy, known), demand)
    if isinstance(drawn, Reservation):
        drawn.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "shortlist", lambda *_: None)
        whole = placed(placer_of(fleet, policy, known), demand)
    if isinstance(drawn, str) or isinstance(whole, str):
        assert drawn == whole
        return
    for found in (drawn, whole):
        assert found.decode.attached
        assert found.decode.info.role is Role.PREFILL or not found.decode.used_blocks > 100
    roles = Counter(m.info.role for m in fleet.members.values() if m.attached)
    if max(roles.values()) == 1:
        assert [m.worker_id for m in drawn.members] == [m.worker_id for m in whole.members]


@pytest.mark.parametrize("policy", POLICIES)
def test_few_workers_are_compared_and_explain_counts_the_others(policy: str) -> None:
    names = [f"{role}{i}" for i in range(30) for role in "pda"]
    placer = placer_of(fleet_of(*names), policy, FixedLookups(dict.fromkeys(names, 16)))
    for _ in range(5):
        with placer.reserve(DEMAND):
            told = explained(placer._log.of("r")).decisions[-1]
        assert len(told.candidates) <= MOST
        assert len(told.candidates) + told.not_drawn == len(names)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([300, 800, 1700])), min_size=40))
def test_full_workers_are_found_again_as_soon_as_they_have_room(
    steps: list[tuple[int, int]],
) -> None:
    """Some requests end before the next one arrives, of any size."""
    fleet = fleet_of(*(f"{role}{i}" for i in range(9) for role in "pd"))
    for m in fleet.members.values():
        m.info = replace(m.info, limits=replace(m.info.limits, max_num_batched_tokens=64))
    placer, whole = placer_of(fleet, "least_loaded"), placer_of(fleet, "least_loaded")
    held: list[Reservation] = []
    for ending, tokens in steps:
        for _ in range(ending * (len(held) > 8)):
            held.pop(0).release()
        demand = Demand("demo", prompt_tokens=min(tokens, 1500), kv_tokens=tokens, request_id="r")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fleet, "shortlist", lambda *_: None)
            expected = placed(whole, demand)
        if isinstance(expected, Reservation):
            expected.release()
        found = placed(placer, demand)
        if isinstance(found, Reservation):
            held.append(found)
        assert isinstance(found, Reservation) or found == expected
        assert isinstance(expected, Reservation) or found == expected


def bounded_cases() -> dict[str, Any]:
    retry = Constraints(RetryStep.PAIR, avoid=frozenset({"p0", "d0"}))
    excluded = Constraints(RetryStep.AGGREGATED, without=frozenset({"d0"}))
    return {
        "adapter": lambda x: x.reserve(structs.replace(DEMAND, adapter="lora@1")),
        "revision": lambda x: x.reserve(DEMAND),
        "retry": lambda x: x.reserve_again(DEMAND, retry, cause="failed"),
        "without a worker": lambda x: x.reserve_again(DEMAND, excluded, cause="failed"),
        "live KV": lambda x: x.reserve_live(DEMAND, "d1", cause="drain"),
        "full": lambda x: placed(x, structs.replace(DEMAND, kv_tokens=1600)),
    }


@pytest.mark.parametrize("case", bounded_cases())
def test_adapters_revisions_retries_and_full_fleets_compare_few_workers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = Adapter("lora", "1", "/lora", "demo")
    fleet = Fleet(lease_s=1.0, clock=lambda: 0.0)
    for i, role in ((i, role) for i in range(200) for role in "pd"):
        info = worker_info(f"{role}{i}", ROLES[role], revision=f"v{i % 2}")
        info = replace(info, limits=replace(info.limits, max_loras=1))
        fleet.register(info, adapters=[adapter] if i % 20 == 0 else [])
        fleet.members[info.worker_id].attached = True
        fleet.members[info.worker_id].placed.reserved_blocks = 50 * (case == "full")
    shares = RevisionShares()
    if case == "revision":
        shares.set("demo", {"v0": 0.0, "v1": 1.0})
    placer = Placer(fleet, POLICIES["slo_aware"], shares=shares, log=DecisionLog(1))
    place = bounded_cases()[case]
    for _ in range(20):
        place(placer)  # a full fleet is known as such after some placements

    def whole(*_: object) -> None:
        pytest.fail("all workers are compared")

    monkeypatch.setattr(Fleet, "candidates", whole)
    found = place(placer)
    decision = placer._log.of("r")[-1].decision
    assert len(decision.candidates) <= MOST
    assert decision.not_drawn == 400 - len(decision.candidates)
    if case == "full":
        assert found == "NoRoom"
    elif case == "adapter":
        assert all(int(m.worker_id[1:]) % 20 == 0 for m in found.members)
    elif case == "revision":
        assert {m.info.revision for m in found.members} == {"v1"}


def test_every_worker_of_a_large_fleet_has_its_turn() -> None:
    placer = placer_of(fleet_of("p", *(f"d{i}" for i in range(20))), "round_robin")
    found = Counter(placer.reserve(DEMAND).decode.worker_id for _ in range(40))
    assert set(found.values()) == {2}


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "slo_aware"])
def test_a_large_fleet_is_loaded_evenly_and_to_the_last_block(policy: str) -> None:
    fleet = fleet_of(*(f"{role}{i}" for i in range(10) for role in "pd"))
    placer = placer_of(fleet, policy)
    with suppress(Unavailable):
        for number in count():
            placer.reserve(DEMAND).prefilled()
            requests = [
                m.placed.outstanding_requests for x, m in fleet.members.items() if x[0] == "d"
            ]
            if number == 50:
                assert max(requests) - min(requests) <= 3
    assert {m.placed.reserved_blocks for x, m in fleet.members.items() if x[0] == "d"} == {100}


def test_both_phases_are_at_one_place_and_near_the_router() -> None:
    fleet = Fleet(lease_s=1.0, clock=lambda: 0.0, topology={"region": "r7"})
    for i, role in ((i, role) for i in range(40) for role in "pd"):
        info = worker_info(f"{role}{i}", ROLES[role], topology={"region": f"r{i % 10}"})
        fleet.register(info)
        fleet.members[info.worker_id].attached = True
    placer = placer_of(fleet, "least_loaded")
    for _ in range(10):
        found = placer.reserve(DEMAND)
        assert {m.info.topology["region"] for m in found.members} == {"r7"}


def test_the_workers_of_the_session_and_of_the_cached_prompt_are_compared() -> None:
    names = [f"{role}{i}" for i in range(20) for role in "pd"]
    known = FixedLookups({"p17": 96, "d13": 96, **{f"p{i}": 16 for i in range(10)}})
    placer = placer_of(fleet_of(*names), "prefix_aware", known)
    demand = structs.replace(DEMAND, session="s", session_workers=frozenset({"d13", "p17"}))
    for _ in range(10):
        with placer.reserve(demand) as found:
            assert [m.worker_id for m in found.members] == ["p17", "d13"]
