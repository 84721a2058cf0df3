"""Placement: who gets a request, given what is known of each worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec import structs

from pdserve.config import RouterConfig
from pdserve.errors import Unavailable
from pdserve.types import Adapter, EngineLimits, WorkerLoad
from router.attempt.placer import Charge
from router.placement.cost import MARGIN
from router.placement.filters import check_servable, why_not
from router.placement.policies import (
    MOST_PREDICTED,
    MOST_SCORED,
    POLICIES,
    place_aggregated,
    place_live,
    place_or_aggregate,
)
from router.placement.values import (
    NO_CONTEXT,
    Demand,
    MemberState,
    PlacementContext,
    PrefixFetch,
)
from tests.support.placement import (
    DEMAND,
    FULL,
    HALF,
    IDLE,
    FixedLookups,
    busy,
    decide,
    names,
    place,
    seen,
    worker,
)

if TYPE_CHECKING:
    from router.fleet.member import Member

Names = tuple[str | None, str] | None
ONE_TOKEN = structs.replace(DEMAND, prefill_only=True)


def test_every_policy_has_a_name_in_the_configuration() -> None:
    for name in POLICIES:
        assert msgspec.convert({"policy": name}, RouterConfig).policy == name


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([worker("p"), worker("d")], ("p", "d"), id="a pair"),
        pytest.param([worker("a")], (None, "a"), id="aggregated alone"),
        pytest.param([worker("p"), worker("d1", HALF), worker("d2", IDLE)], ("p", "d2"),
                     id="free blocks"),
        pytest.param([worker("p"), worker("d1", WorkerLoad(7, 0, 0.5, 50)),
                      worker("d2", WorkerLoad(0, 1, 0.5, 50))], ("p", "d2"),
                     id="waiting requests count as running"),
        pytest.param([worker("p"), worker("d-blind"), worker("d", IDLE), worker("d2", FULL)],
                     ("p", "d"), id="an unknown load is not an idle one"),
        pytest.param([worker("p1", compatibility="x"), worker("p2"), worker("d")], ("p2", "d"),
                     id="only a partner that can hand over"),
        pytest.param([worker("p", IDLE), worker("d", FULL), worker("a", IDLE)], (None, "a"),
                     id="an idle aggregated worker beats a busy pair"),
        pytest.param([worker("p", IDLE), worker("d", IDLE), worker("a", HALF)], ("p", "d"),
                     id="an idle pair beats a busy aggregated worker"),
        pytest.param([worker("p"), worker("d-small", IDLE, blocks=4), worker("d", FULL)],
                     ("p", "d"), id="a worker that could never hold the prompt is passed over"),
    ],
)  # fmt: skip
def test_the_least_loaded_get_a_request(members: list[Member], expected: Names) -> None:
    assert place(members) == expected


def test_a_blind_worker_among_busy_ones_does_not_attract_all_traffic() -> None:
    members = [worker("p"), *(worker(f"d{i}", HALF) for i in range(3)), worker("d-blind")]
    by_name = {member.worker_id: member for member in members}
    placed: list[str] = []
    for turn in range(12):
        found = place(members, demand=Demand("demo", 100, 100), turn=turn)
        assert found is not None
        Charge(by_name[found[1]], kv_tokens=100)
        placed.append(found[1])
    assert {name: placed.count(name) for name in placed} == dict.fromkeys(placed, 3)
    assert len(set(placed)) == 4


def in_group(member: Member) -> Member:
    return replace(member, info=replace(member.info, group="d0"))


def test_the_rank_of_a_group_with_the_fewest_tokens_gets_a_request() -> None:
    few_long, many_short = WorkerLoad(0, 1, 0.4, 60), WorkerLoad(0, 6, 0.1, 90)
    ranks = [worker("d0", few_long), worker("d1", many_short)]
    assert place([worker("p"), *ranks]) == ("p", "d0")
    assert place([worker("p"), *map(in_group, ranks)]) == ("p", "d1")


def test_the_rank_of_a_group_without_a_slot_is_passed_over() -> None:
    ranks = [worker("d0", WorkerLoad(0, 8, 0.0, 100)), worker("d1", WorkerLoad(0, 7, 0.1, 90))]
    assert place([worker("p"), *map(in_group, ranks)]) == ("p", "d1")


def test_a_request_waits_while_no_decode_worker_has_room() -> None:
    decode = worker("d")
    charge = Charge(decode, kv_tokens=1600 - 160)
    members = [worker("p"), decode]
    assert place(members, demand=Demand("demo", 100, 160)) == ("p", "d")
    assert place(members, demand=Demand("demo", 100, 161)) is None
    charge.release()
    assert place(members, demand=Demand("demo", 100, 161)) == ("p", "d")


def test_one_token_needs_no_decode_worker() -> None:
    assert place([worker("p")], demand=ONE_TOKEN) == (None, "p")
    assert place([worker("p"), worker("d", reserved_blocks=100)], demand=ONE_TOKEN) == (None, "p")
    with pytest.raises(Unavailable, match="no prefill worker is ready for model demo"):
        place([worker("d")], demand=ONE_TOKEN)


def test_the_worker_to_avoid_is_taken_only_for_want_of_another() -> None:
    demand = structs.replace(DEMAND, avoid=frozenset({"p1"}))
    both = [worker("p1"), worker("p2"), worker("d")]
    assert [place(both, demand=demand, turn=turn) for turn in (0, 1)] == [("p2", "d")] * 2
    assert place([worker("p1"), worker("d")], demand=demand) == ("p1", "d")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([worker("p")], "no decode worker is ready for model demo"),
        ([worker("d")], "no prefill worker is ready for model demo"),
        ([], "no prefill worker and no decode worker is ready for model demo"),
        ([worker("p"), worker("d", draining=True)], "no decode worker is ready for model demo"),
        ([worker("p"), worker("d", attached=False)], "no decode worker is ready for model demo"),
        ([worker("p", lost=True), worker("d")], "no prefill worker is ready for model demo"),
        (
            [worker("p", compatibility="x"), worker("d", compatibility="y")],
            r"can receive KV from a prefill worker: compatibility: x on p, y on d$",
        ),
        (
            [worker("p", transports=("shm",)), worker("d", transports=("tcp",))],
            r"can receive KV from a prefill worker: transports: shm on p, tcp on d$",
        ),
        (
            [worker("p"), *(worker(f"d{i}", compatibility="y") for i in range(5))],
            r"layout-a on p, y on d0 \| .* on d1 \| .* on d2 \| and 2 more pairs$",
        ),
    ],
)
def test_missing_packages_are_named(members: list[Member], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        place(members)
    with pytest.raises(Unavailable, match=message):
        check_servable(seen(members), "demo")


HOT = worker("p", unhealthy="hot")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([worker("p"), worker("d", FULL)], ("p", "d"), id="a pair, if there is one"),
        pytest.param([HOT, worker("d1", HALF), worker("d2", IDLE)], (None, "d2"),
                     id="a suspended prefill worker"),
        pytest.param([worker("p", lost=True), worker("d")], (None, "d"), id="a lost one"),
        pytest.param([worker("p"), worker("d", unhealthy="hot")], (None, "p"),
                     id="a suspended decode worker"),
        pytest.param([HOT, worker("d", reserved_blocks=95)], None, id="room is waited for"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("demand", [DEMAND, ONE_TOKEN], ids=["answer", "one token"])
def test_without_a_pair_one_worker_does_both(
    members: list[Member], expected: Names, demand: Demand
) -> None:
    found = seen(members)
    decision = place_or_aggregate(POLICIES["least_loaded"], found, demand, 0, NO_CONTEXT)
    if demand.prefill_only and found[0].state is MemberState.READY:
        expected = (None, "p")
    assert names(decision.placement) == expected
    check_servable(found, "demo", aggregated=True)


def test_without_a_ready_worker_the_policy_names_the_missing_role() -> None:
    found = seen([HOT, worker("d", draining=True)])
    message = "no prefill worker and no decode worker is ready for model demo"
    with pytest.raises(Unavailable, match=message):
        place_or_aggregate(POLICIES["least_loaded"], found, DEMAND, 0, NO_CONTEXT)
    with pytest.raises(Unavailable, match=message):
        check_servable(found, "demo", aggregated=True)
    with pytest.raises(Unavailable, match="no worker is ready for model demo"):
        place_aggregated(found, DEMAND, 0, NO_CONTEXT)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([worker("p", IDLE), worker("d", FULL)], "d"),
        ([worker("p"), worker("a")], "a"),
        ([worker("p")], "p"),
        ([worker("d1"), worker("d2")], "d2"),
        ([worker("d1")], "d1"),
    ],
)
def test_aggregated_placement_prefers_workers_that_decode(
    members: list[Member], expected: str
) -> None:
    demand = structs.replace(DEMAND, avoid=frozenset({"d1"}))
    decision = place_aggregated(seen(members), demand, 0, NO_CONTEXT)
    assert names(decision.placement) == (None, expected)


def test_live_kv_goes_to_a_decode_worker_that_can_have_it() -> None:
    source = worker("d0")
    others = [
        source,
        worker("a"),
        worker("p"),
        worker("d-full", blocks=1),
        worker("d-excluded"),
        worker("d-strange", compatibility="layout-b"),
        worker("d-draining", draining=True),
    ]
    demand = structs.replace(DEMAND, excluded=frozenset({("d0", "d-excluded")}))
    policy = partial(place_live, source.snapshot())
    with pytest.raises(Unavailable, match="no decode worker can continue with the KV of d0"):
        policy(seen(others), demand, 0, NO_CONTEXT)
    able = [worker("d1", HALF), worker("d2", IDLE)]
    decision = policy(seen([*others, *able]), demand, 0, NO_CONTEXT)
    assert names(decision.placement) == (None, "d2")
    assert why_not(decision)["p"] == "cannot decode with the live KV"


def test_why_a_worker_was_not_scored() -> None:
    demand = structs.replace(DEMAND, avoid=frozenset({"p-bad"}), excluded=frozenset({("p2", "d")}))
    members = [
        *(worker(name) for name in ("p", "p2", "p-bad", "d", "a")),
        worker("p-lone", compatibility="layout-b"),
        worker("d-lone", compatibility="layout-c"),
        worker("d-full", reserved_blocks=95),
        worker("d-small", blocks=4),
        worker("d-gone", lost=True),
    ]
    assert why_not(decide(members, demand=demand)) == {
        "p2": "every pair with it is ejected",
        "p-bad": "to be avoided",
        "p-lone": "it can give KV to no decode worker",
        "d-lone": "no prefill worker can give KV to it",
        "d-full": "no room: 95 of 100 blocks are reserved, 150 tokens needed",
        "d-small": "holds 64 tokens, the prompt alone has 100",
        "d-gone": "lost",
    }


# Policies that take turns or draw.


def test_round_robin_takes_turns_regardless_of_load() -> None:
    members = [worker(f"p{i}", busy(i)) for i in range(3)]
    members += [worker(f"d{i}", busy(4 * i)) for i in range(2)]
    found = [place(members, "round_robin", turn=turn) for turn in range(6)]
    assert found == [(f"p{i % 3}", f"d{i % 2}") for i in range(6)]


def test_power_of_two_takes_the_better_of_two_and_so_never_the_worst() -> None:
    members = [worker("p"), *(worker(f"d{i}", busy(i)) for i in range(8))]
    taken = [place(members, "power_of_two", turn=turn) for turn in range(2000)]
    assert ("p", "d7") not in taken
    # Of 28 pairs of eight, the i-th best is the better one in 7 - i.
    for i in range(7):
        assert abs(taken.count(("p", f"d{i}")) / 2000 - (7 - i) / 28) < 0.04


def test_power_of_two_draws_for_each_phase_by_itself() -> None:
    members = [worker(f"{role}{i}") for role in "pd" for i in range(4)]
    found = {place(members, "power_of_two", turn=turn) for turn in range(400)}
    assert len(found) == 16


# 300 workers of each phase; the later ones are busier.
LARGE = [worker(f"{role}{i}", busy(i * 8 // 300)) for i in range(300) for role in "pd"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_number_of_scored_workers_does_not_grow_with_the_pool(policy: str) -> None:
    chosen = set()
    for turn in range(60):
        decision = decide(LARGE, policy, turn=turn)
        assert decision.placement is not None
        for board in (decision.prefill, decision.decode):
            assert board is not None
            assert 1 <= len(board.candidates) <= MOST_SCORED
        load = decision.placement.decode.load
        assert load is not None
        # An eighth of all: missed once in 5,000 draws of 64.
        assert load.num_running_reqs == 0 or policy in ("round_robin", "power_of_two")
        chosen.add(decision.placement.decode.worker_id)
    assert len(chosen) > 15, "one draw is not like another"


def test_a_worker_with_the_cached_prompt_is_always_among_the_scored() -> None:
    known = FixedLookups({"p17": 96, **{f"p{i}": 16 for i in range(100, 200)}})
    for turn in range(20):
        found = place(LARGE, "prefix_aware", turn=turn, known=known)
        assert found is not None
        assert found[0] == "p17"


# The workers of the session's last turn.

IN_SESSION = structs.replace(DEMAND, session="s", session_workers=frozenset({"p2", "d2"}))
FOUR = [worker("p1"), worker("p2"), worker("d1"), worker("d2")]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "slo_aware"])
@pytest.mark.parametrize(
    ("members", "cached", "expected"),
    [
        pytest.param(FOUR, {}, ("p2", "d2"), id="they serve the next turn"),
        pytest.param([*FOUR[:2], worker("d1", busy(1)), worker("d2", busy(3))], {}, ("p2", "d2"),
                     id="also if they are a little busier"),
        pytest.param([*FOUR[:2], worker("d1", IDLE), worker("d2", FULL)], {}, ("p2", "d1"),
                     id="not if they are full"),
        pytest.param([FOUR[0], worker("p2", outstanding_tokens=200), *FOUR[2:]], {}, ("p1", "d2"),
                     id="not if prompts wait there"),
    ],
)  # fmt: skip
def test_a_session_prefers_the_workers_of_its_last_turn(
    policy: str, members: list[Member], cached: dict[str, int], expected: tuple[str, str]
) -> None:
    known = FixedLookups(cached)
    for turn in range(4):
        assert place(members, policy, demand=IN_SESSION, turn=turn, known=known) == expected


def test_a_session_does_not_prefer_a_worker_that_has_lost_its_history() -> None:
    found = place(FOUR, "prefix_aware", demand=IN_SESSION, known=FixedLookups({"p1": 64, "d1": 64}))
    assert found == ("p1", "d1")


def test_a_session_finds_its_workers_in_a_large_pool() -> None:
    demand = structs.replace(DEMAND, session="s", session_workers=frozenset({"p17", "d18"}))
    for policy in ("least_loaded", "prefix_aware"):
        found = {place(LARGE, policy, demand=demand, turn=turn) for turn in range(20)}
        assert found <= {("p17", "d18")}, policy


# What is cached against what is loaded. `outstanding_tokens` wait for prefill.

PAIRS = [worker("p1"), worker("p2"), worker("d")]


@pytest.mark.parametrize(
    ("members", "cached", "expected"),
    [
        pytest.param(PAIRS, {"p2": 32}, ("p2", "d"), id="the prompt's beginning draws"),
        pytest.param(PAIRS, {"p1": 32, "p2": 48}, ("p2", "d"),
                     id="the longer beginning draws more"),
        pytest.param([worker("p1"), worker("p2", outstanding_tokens=90), worker("d")],
                     {"p2": 100}, ("p2", "d"), id="as long as less waits than is saved"),
        pytest.param([worker("p1"), worker("p2", outstanding_tokens=110), worker("d")],
                     {"p2": 100}, ("p1", "d"), id="not where more waits than is saved"),
        pytest.param([worker("p1"), worker("p2", outstanding_tokens=90), worker("d")],
                     {"p2": 16}, ("p1", "d"), id="a short beginning is not worth a queue"),
        pytest.param([worker("p"), worker("d1"), worker("d2")], {"d2": 64}, ("p", "d2"),
                     id="what decode has need not travel"),
        pytest.param([worker("p"), worker("d1", IDLE), worker("d2", busy(6))], {"d2": 100},
                     ("p", "d1"), id="a busy decode worker is not worth that"),
        pytest.param([worker("p"), worker("d"), worker("a")], {"a": 100}, (None, "a"),
                     id="an aggregated worker with the prompt"),
        pytest.param([worker("p1", outstanding_tokens=5), worker("p2"), worker("d")], {},
                     ("p2", "d"), id="nothing cached: the least loaded"),
        pytest.param([worker("p1"), worker("d")], {"gone": 100}, ("p1", "d"),
                     id="a worker that is not there"),
    ],
)  # fmt: skip
def test_a_cached_prompt_draws_as_much_as_it_saves(
    members: list[Member], cached: dict[str, int], expected: Names
) -> None:
    assert place(members, "prefix_aware", known=FixedLookups(cached)) == expected
    if not cached:
        assert place(members, "prefix_aware") == expected


# The default policy: prefill goes where it is predicted to cost least.


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
    known = FixedLookups(costs={("p0", "d0"): remote, (None, "d0"): local})
    assert place([worker("p0"), worker("d0")], "slo_aware", known=known) == (expected, "d0")


def test_prefill_goes_where_the_first_token_comes_soonest() -> None:
    members = [worker("p0"), worker("p1"), worker("d0")]
    costs = {("p0", "d0"): 3.0, ("p1", "d0"): 1.0, (None, "d0"): 2.0}
    assert place(members, "slo_aware", known=FixedLookups(costs=costs)) == ("p1", "d0")
    # A prefill worker that nothing is known of is passed over where another is known.
    known = FixedLookups(costs={("p1", "d0"): 9.0})
    assert place(members, "slo_aware", known=known) == ("p1", "d0")


COPY = PrefixFetch("d1", 64, 64, 1, 0.01, 0.1, 0.005, 40)


@pytest.mark.parametrize(
    ("change", "copied"),
    [
        pytest.param({}, {("p1", "d1")}, id="from the worker with the most"),
        pytest.param(
            {"excluded": frozenset({("d1", "p1")})}, {("p1", "p2")}, id="not over a bad link"
        ),
        pytest.param(
            {"avoid": frozenset({"d1"})}, {("p1", "p2")}, id="not from a worker to be avoided"
        ),
        pytest.param({"without": frozenset({"d1"})}, {("p1", "p2")}, id="not from one that failed"),
        pytest.param({"media": (("hash", 0, 9),)}, set(), id="not with images"),
    ],
)
@pytest.mark.parametrize("policy", ["prefix_aware", "slo_aware"])
def test_cached_blocks_are_copied_to_a_worker_that_lacks_them(
    policy: str, change: dict[str, Any], copied: set[tuple[str, str]]
) -> None:
    """p2 lacks less than a block, p3 is of another kind, and p4 and d4 are of an earlier version,
    which does not copy."""
    workers = [worker(x, IDLE) for x in ("p1", "p2", "d1", "d2", "p4", "d4")]
    for old in workers[-2:]:
        assert old.info.kv is not None
        old.info = replace(old.info, kv=replace(old.info.kv, copies=False))
    workers.append(worker("p3", IDLE, compatibility="layout-b"))
    fetches = dict.fromkeys(("p1", "p2", "p3", "p4"), COPY)
    known = FixedLookups({"d1": 64, "p2": 60, "d4": 96}, fetches=fetches)
    demand = structs.replace(DEMAND, **change)
    decision = decide(workers, policy, demand=demand, known=known)
    assert known.copied == copied
    assert decision.cached.get("p1", 0) == (40 if copied else 0)
    off = POLICIES[policy](seen(workers), demand, 0, PlacementContext(known, known, fetches=False))
    assert not off.fetches


def test_a_busy_prefill_worker_gives_its_prefix_to_an_idle_one() -> None:
    workers = [worker("p1", IDLE, outstanding_tokens=90), worker("p2", IDLE), worker("d1", IDLE)]
    plan = structs.replace(COPY, holder="p1", worth=80)
    for fetches, expected in (({}, "p1"), ({"p2": plan}, "p2")):
        known = FixedLookups({"p1": 96}, fetches=fetches)
        assert place(workers, "prefix_aware", known=known) == (expected, "d1")


def test_without_predictions_it_places_as_prefix_aware_does() -> None:
    members = [worker("p0"), worker("p1"), worker("d0"), worker("d1", busy(4)), worker("a")]
    for turn in range(6):
        found = place(members, "slo_aware", turn=turn, known=FixedLookups())
        assert found == place(members, "prefix_aware", turn=turn)


def test_pairs_that_cannot_exchange_kv_are_not_predicted() -> None:
    strange = {"compatibility": "layout-b"}
    members = [worker("p0"), worker("p1"), worker("d0")]
    members += [worker("p2", **strange), worker("d2", busy(9), **strange)]  # type: ignore[arg-type]
    known = FixedLookups(costs={("p0", "d0"): 1.0, ("p1", "d0"): 2.0, ("p2", "d0"): 0.1})
    demand = structs.replace(DEMAND, excluded=frozenset({("p0", "d0")}))
    assert place(members, "slo_aware", demand=demand, known=known) == ("p1", "d0")
    assert set(known.asked) == {"p1", None}
    # With all pairs excluded the decode worker does both phases, whatever that costs.
    members = [worker("p0"), worker("d0")]
    assert place(members, "slo_aware", demand=demand, known=known) == (None, "d0")


def test_only_some_prefill_workers_of_a_large_pool_are_predicted() -> None:
    many = [worker(f"p{i}", busy(i)) for i in range(40)]
    known = FixedLookups(costs={(member.worker_id, "d0"): 1.0 for member in many})
    place([*many, worker("d0")], "slo_aware", known=known)
    assert len(known.asked) == MOST_PREDICTED + 1


def test_a_single_token_and_an_aggregated_worker_are_placed_by_score() -> None:
    known = FixedLookups(costs={(None, "d0"): 0.0, ("p0", "d0"): 0.0, (None, "a0"): 1.0})
    pair = [worker("p0"), worker("d0")]
    assert place(pair, "slo_aware", demand=ONE_TOKEN, known=known) == (None, "p0")
    assert place([worker("a0")], "slo_aware", known=known) == (None, "a0")
    assert known.asked == []


def test_an_adapter_goes_where_it_runs_then_where_a_slot_is_free_and_waits_for_none() -> None:
    def decode(name: str, *resident: tuple[str, int], adapters: str = "xyz") -> Member:
        loaded = {key: Adapter(key, "", "", "demo") for key in adapters}
        member = worker(name, HALF, adapters=loaded, resident=dict(resident))
        member.info = replace(member.info, limits=EngineLimits(8, max_loras=2))
        return member

    used, free = decode("d0", ("x", 0), ("y", 1)), decode("d1")
    idle = decode("d2", ("y", 1), ("z", 0))
    full, without = decode("d3", ("y", 1), ("z", 2)), decode("d4", adapters="yz")
    demand, members = structs.replace(DEMAND, adapter="x"), [without, full, idle, free, used]
    prefill = decode("p")
    for best in (used, free, idle):
        assert place([*members, prefill], demand=demand) == ("p", best.worker_id)
        members.remove(best)
    decision = decide([*members, prefill], demand=demand)
    assert decision.placement is None
    reasons = why_not(decision)
    assert reasons["d3"] == "as many other adapters run there as max_loras (2) allows"
    assert reasons["d4"] == "adapter x is not loaded"


def test_a_prefill_worker_that_has_the_adapter_is_kept_unless_another_is_clearly_cheaper() -> None:
    loaded = {"x": Adapter("x", "", "", "demo")}
    members = [worker(name, HALF, adapters=loaded) for name in ("p0", "p1", "d0")]
    for member in members:
        member.info = replace(member.info, limits=EngineLimits(8, max_loras=1))
    members[1].placed.resident = {"x": 0}
    for cost, expected in ((0.97, "p1"), (0.5, "p0")):
        known = FixedLookups(costs={("p0", "d0"): cost, ("p1", "d0"): 1.0})
        demand = structs.replace(DEMAND, adapter="x")
        assert place(members, "slo_aware", demand=demand, known=known) == (expected, "d0")


def test_an_adapter_keeps_its_slot_until_another_needs_it() -> None:
    member = worker("d")
    member.info = replace(member.info, limits=EngineLimits(8, max_loras=2))
    first, second = Charge(member, adapter="x"), Charge(member, adapter="y")
    assert not member.snapshot().can_run("z")
    first.release()
    assert member.snapshot().can_run("z")
    assert member.placed.resident == {"x": 0, "y": 1}
    third = Charge(member, adapter="z")
    assert member.placed.resident == {"y": 1, "z": 1}
    second.release()
    third.release()
