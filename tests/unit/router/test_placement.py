"""Placement: who gets a request, given what is known of each worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pdserve.errors import ModelNotFound, Unavailable
from pdserve.types import Role, WorkerLoad
from router.fleet.member import Member
from router.placement.filters import (
    check_servable,
    no_workers,
    why_not,
)
from router.placement.policies import (
    POLICIES,
    place_aggregated,
    place_live,
    place_or_aggregate,
)
from router.placement.values import (
    NO_CONTEXT,
    Demand,
    MemberState,
    Placement,
)
from router.placer import Charge
from tests.fakes import worker_info

LEAST_LOADED = POLICIES["least_loaded"]
DEMAND = Demand("demo", prompt_tokens=100, kv_tokens=150)
IDLE = WorkerLoad(0, 0, 0.0, 100)
HALF = WorkerLoad(0, 4, 0.5, 50)
FULL = WorkerLoad(8, 8, 1.0, 0)


def member(
    worker_id: str,
    role: Role,
    load: WorkerLoad | None = None,
    *,
    compatibility: str = "layout-a",
    transports: tuple[str, ...] = ("loopback",),
    blocks: int = 100,
) -> Member:
    info = worker_info(worker_id, role, compatibility=compatibility, total_blocks=blocks)
    if info.kv is not None:
        info = replace(info, kv=replace(info.kv, transports=transports))
    return Member(info, lease_end=1.0, attached=True, load=load)


def least_loaded(members: list[Member], demand: Demand, turn: int) -> Placement | None:
    seen = [m.seen() for m in members]
    return LEAST_LOADED(seen, demand, turn, NO_CONTEXT).placement


def names(placement: Placement | None) -> tuple[str, str | None] | None:
    if placement is None:
        return None
    prefill = placement.prefill
    return placement.decode.worker_id, None if prefill is None else prefill.worker_id


P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED
READY = MemberState.READY


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([member("p", P), member("d", D)], ("d", "p"), id="a pair"),
        pytest.param([member("a", A)], ("a", None), id="aggregated alone"),
        pytest.param(
            [member("p", P), member("d1", D, HALF), member("d2", D, IDLE)],
            ("d2", "p"),
            id="free blocks",
        ),
        pytest.param(
            [
                member("p", P),
                member("d1", D, WorkerLoad(7, 0, 0.5, 50)),
                member("d2", D, WorkerLoad(0, 1, 0.5, 50)),
            ],
            ("d2", "p"),
            id="waiting requests count as running",
        ),
        pytest.param(
            [member("p", P), member("blind", D), member("idle", D, IDLE), member("full", D, FULL)],
            ("idle", "p"),
            id="an unknown load is not an idle one",
        ),
        pytest.param(
            [member("p1", P, compatibility="x"), member("p2", P), member("d", D)],
            ("d", "p2"),
            id="only a partner that can hand over",
        ),
        pytest.param(
            [member("p", P, IDLE), member("d", D, FULL), member("a", A, IDLE)],
            ("a", None),
            id="an idle aggregated worker beats a busy pair",
        ),
        pytest.param(
            [member("p", P, IDLE), member("d", D, IDLE), member("a", A, HALF)],
            ("d", "p"),
            id="an idle pair beats a busy aggregated worker",
        ),
        pytest.param(
            [member("p", P), member("small", D, IDLE, blocks=4), member("d", D, FULL)],
            ("d", "p"),
            id="a worker that could never hold the prompt is passed over",
        ),
    ],
)
def test_a_request_goes_to(members: list[Member], expected: tuple[str, str | None]) -> None:
    assert names(least_loaded(members, DEMAND, 0)) == expected


def test_a_blind_worker_among_busy_ones_does_not_attract_all_traffic() -> None:
    members = [member("p", P), *(member(f"d{i}", D, HALF) for i in range(3)), member("blind", D)]
    placed: list[str] = []
    for turn in range(12):
        placement = least_loaded(members, Demand("demo", 100, 100), turn)
        assert placement is not None
        Charge(next(m for m in members if m.worker_id == placement.decode.worker_id), kv_tokens=100)
        placed.append(placement.decode.worker_id)
    assert {name: placed.count(name) for name in set(placed)} == {
        "d0": 3,
        "d1": 3,
        "d2": 3,
        "blind": 3,
    }


def test_a_request_waits_while_no_decode_worker_has_room() -> None:
    decode = member("d", D)
    charge = Charge(decode, kv_tokens=1600 - 160)
    members = [member("p", P), decode]
    assert names(least_loaded(members, Demand("demo", 100, 160), 0)) == ("d", "p")
    assert least_loaded(members, Demand("demo", 100, 161), 0) is None
    charge.release()
    assert names(least_loaded(members, Demand("demo", 100, 161), 0)) == ("d", "p")


def test_one_token_needs_no_decode_worker() -> None:
    demand = Demand("demo", 100, 101, prefill_only=True)
    assert names(least_loaded([member("p", P)], demand, 0)) == ("p", None)
    full = member("d", D)
    Charge(full, kv_tokens=1600)
    assert names(least_loaded([member("p", P), full], demand, 0)) == ("p", None)
    with pytest.raises(Unavailable, match="no prefill worker is ready for model demo"):
        least_loaded([member("d", D)], demand, 0)


def test_the_worker_to_avoid_is_taken_only_for_want_of_another() -> None:
    demand = replace(DEMAND, avoid=frozenset({"p1"}))
    both = [member("p1", P), member("p2", P), member("d", D)]
    assert [names(least_loaded(both, demand, turn)) for turn in (0, 1)] == [("d", "p2")] * 2
    assert names(least_loaded([member("p1", P), member("d", D)], demand, 0)) == ("d", "p1")


def not_ready(worker_id: str, role: Role, **state: object) -> Member:
    found = member(worker_id, role)
    for name, value in state.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([member("p", P)], "no decode worker is ready for model demo"),
        ([member("d", D)], "no prefill worker is ready for model demo"),
        ([], "no prefill worker and no decode worker is ready for model demo"),
        (
            [member("p", P), not_ready("d", D, draining=True)],
            "no decode worker is ready for model demo",
        ),
        (
            [member("p", P), not_ready("d", D, attached=False)],
            "no decode worker is ready for model demo",
        ),
        (
            [not_ready("p", P, lost=True), member("d", D)],
            "no prefill worker is ready for model demo",
        ),
        (
            [member("p", P, compatibility="x"), member("d", D, compatibility="y")],
            r"can receive KV from a prefill worker: compatibility: x on p, y on d$",
        ),
        (
            [member("p", P, transports=("shm",)), member("d", D, transports=("tcp",))],
            r"can receive KV from a prefill worker: transports: shm on p, tcp on d$",
        ),
        (
            [member("p", P), *(member(f"d{i}", D, compatibility="y") for i in range(5))],
            r"layout-a on p, y on d0 \| .* on d1 \| .* on d2 \| and 2 more pairs$",
        ),
    ],
)
def test_what_is_missing_is_named(members: list[Member], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        least_loaded(members, DEMAND, 0)
    with pytest.raises(Unavailable, match=message):
        check_servable([m.seen() for m in members], "demo")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param(
            [member("p", P), member("d", D, FULL)], ("d", "p"), id="a pair, if there is one"
        ),
        pytest.param(
            [not_ready("p", P, unhealthy="hot"), member("d1", D, HALF), member("d2", D, IDLE)],
            ("d2", None),
            id="a suspended prefill worker",
        ),
        pytest.param(
            [not_ready("p", P, unhealthy="hot"), member("d", D)], ("d", None), id="an unwell one"
        ),
        pytest.param([not_ready("p", P, lost=True), member("d", D)], ("d", None), id="a lost one"),
        pytest.param(
            [member("p", P), not_ready("d", D, unhealthy="hot")],
            ("p", None),
            id="a suspended decode worker",
        ),
        pytest.param(
            [not_ready("p", P, unhealthy="hot"), not_ready("d", D, reserved_blocks=95)],
            None,
            id="room is waited for",
        ),
    ],
)
@pytest.mark.parametrize("prefill_only", [False, True])
def test_without_a_pair_one_worker_does_both(
    members: list[Member], expected: tuple[str, str | None] | None, prefill_only: bool
) -> None:
    demand = replace(DEMAND, prefill_only=prefill_only)
    seen = [m.seen() for m in members]
    decision = place_or_aggregate(LEAST_LOADED, seen, demand, 0, NO_CONTEXT)
    if prefill_only and any(m.info.role is P and m.state is READY for m in members):
        assert decision.placement is not None
        assert decision.placement.decode.role is P
    else:
        assert names(decision.placement) == expected
    if any(m.state is READY for m in members):
        check_servable(seen, "demo", aggregated=True)


def test_without_any_worker_that_is_ready_the_policy_says_what_is_missing() -> None:
    seen = [not_ready("p", P, unhealthy="hot").seen(), not_ready("d", D, draining=True).seen()]
    message = "no prefill worker and no decode worker is ready for model demo"
    with pytest.raises(Unavailable, match=message):
        place_or_aggregate(LEAST_LOADED, seen, DEMAND, 0, NO_CONTEXT)
    with pytest.raises(Unavailable, match=message):
        check_servable(seen, "demo", aggregated=True)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([member("p", P, IDLE), member("d", D, FULL)], "d"),
        ([member("p", P), member("a", A)], "a"),
        ([member("p", P)], "p"),
        ([member("d1", D), member("d2", D)], "d2"),
        ([member("d1", D)], "d1"),
    ],
)
def test_aggregated_placement_prefers_workers_that_decode(
    members: list[Member], expected: str
) -> None:
    demand = replace(DEMAND, avoid=frozenset({"d1"}))
    decision = place_aggregated([m.seen() for m in members], demand, 0, NO_CONTEXT)
    assert names(decision.placement) == (expected, None)


def test_aggregated_placement_without_workers_is_refused() -> None:
    with pytest.raises(Unavailable, match="no worker is ready for model demo"):
        place_aggregated([not_ready("d", D, attached=False).seen()], DEMAND, 0, NO_CONTEXT)


def test_live_kv_goes_to_a_decode_worker_that_can_have_it() -> None:
    source = member("d0", D)
    others = [
        member("a", A),
        member("p", P),
        member("full", D, blocks=1),
        member("excluded", D),
        member("stranger", D, compatibility="layout-b"),
        not_ready("draining", D, draining=True),
    ]
    demand = replace(DEMAND, excluded=frozenset({("d0", "excluded")}))
    place = partial(place_live, source.seen())
    with pytest.raises(Unavailable, match="no decode worker can continue with the KV of d0"):
        place([m.seen() for m in (source, *others)], demand, 0, NO_CONTEXT)
    able = [member("d1", D, HALF), member("d2", D, IDLE)]
    decision = place([m.seen() for m in (source, *others, *able)], demand, 0, NO_CONTEXT)
    assert names(decision.placement) == ("d2", None)
    assert why_not(decision)["p"] == "cannot decode with the live KV"


def test_an_unknown_model_is_not_a_missing_worker() -> None:
    unknown, missing = no_workers("other", ["demo"]), no_workers("other", [])
    assert isinstance(unknown, ModelNotFound)
    assert "served are: demo" in unknown.message
    assert isinstance(missing, Unavailable)
