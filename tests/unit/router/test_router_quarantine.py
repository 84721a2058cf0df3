"""Pairs that are kept apart: the breaker itself, and what placement makes of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from pdserve.types import Role, WorkerLoad
from router.canaries import half_open_pair, unused_pair
from router.member import Charge, Member
from router.placement.context import NO_CONTEXT
from router.placement.policies.least_loaded import least_loaded
from router.placement.values import Demand, Placement
from router.quarantine import Quarantine, QuarantinedPair
from tests.fakes import worker_info

SECONDS = 60.0
PAIR, OTHER = ("p1", "d1"), ("p2", "d1")
P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


@pytest.fixture
def struck() -> Quarantine:
    """PAIR was struck at 0."""
    quarantine = Quarantine(SECONDS)
    quarantine.strike(PAIR, 0.0)
    return quarantine


def test_a_pair_that_was_struck_is_closed_for_a_time(struck: Quarantine) -> None:
    assert struck.barred(0.0) == struck.barred(SECONDS - 1) == {PAIR}
    assert struck.barred(SECONDS) == frozenset()
    assert struck.listed(20.0) == [QuarantinedPair(*PAIR, SECONDS - 20.0, 1)]


def test_half_open_one_request_tries_and_the_others_do_not(struck: Quarantine) -> None:
    assert struck.tries(PAIR, SECONDS)
    assert struck.barred(SECONDS) == {PAIR}
    assert not struck.tries(PAIR, SECONDS), "placed before it was closed again"


def test_found_whole_the_pair_is_open(struck: Quarantine) -> None:
    assert struck.tries(PAIR, SECONDS)
    struck.whole(PAIR, SECONDS)
    assert struck.barred(SECONDS) == frozenset()
    assert struck.listed(SECONDS) == []
    assert not struck.tries(PAIR, SECONDS), "an open pair is not tried"


def test_damaged_again_the_pair_is_closed_again(struck: Quarantine) -> None:
    assert struck.tries(PAIR, SECONDS)
    struck.strike(PAIR, SECONDS + 5)
    assert struck.listed(SECONDS + 5) == [QuarantinedPair(*PAIR, SECONDS, 2)]


def test_a_trial_that_says_nothing_is_followed_by_another(struck: Quarantine) -> None:
    """Its client left, or a worker died."""
    assert struck.tries(PAIR, SECONDS)
    assert struck.barred(2 * SECONDS - 1) == {PAIR}
    assert struck.barred(2 * SECONDS) == frozenset()
    assert struck.tries(PAIR, 2 * SECONDS)


def test_pairs_are_struck_one_by_one(struck: Quarantine) -> None:
    struck.strike(OTHER, 30.0)
    assert struck.barred(30.0) == {PAIR, OTHER}
    assert struck.barred(SECONDS) == {OTHER}
    struck.whole(OTHER, SECONDS)
    assert struck.barred(30.0) == {PAIR}


def test_a_request_on_an_open_pair_is_no_trial(struck: Quarantine) -> None:
    assert not struck.tries(OTHER, 0.0)


def test_what_nobody_tries_is_forgotten(struck: Quarantine) -> None:
    assert struck.listed(2 * SECONDS - 1) == [QuarantinedPair(*PAIR, 0.0, 1)]
    assert struck.listed(2 * SECONDS) == []
    assert not struck.tries(PAIR, 2 * SECONDS)


def test_of_no_time_at_all_nothing_is_kept() -> None:
    quarantine = Quarantine(0.0)
    quarantine.strike(PAIR, 0.0)
    assert quarantine.listed(0.0) == []


# -- placement


def member(worker_id: str, role: Role, *, busy: int = 0, compatibility: str = "a") -> Member:
    info = worker_info(worker_id, role, compatibility=compatibility, total_blocks=100)
    load = WorkerLoad(busy, busy, busy / 100, 100 - busy)
    return Member(info, lease_end=1.0, attached=True, load=load)


def place(members: list[Member], *barred: tuple[str, str]) -> tuple[str, str | None]:
    demand = Demand("demo", prompt_tokens=100, kv_tokens=150, barred=frozenset(barred))
    placement = least_loaded([m.seen() for m in members], demand, 0, NO_CONTEXT).placement
    assert isinstance(placement, Placement)
    prefill = placement.prefill
    return placement.decode.worker_id, None if prefill is None else prefill.worker_id


def test_a_barred_pair_gives_way_to_the_next_best() -> None:
    members = [member("p1", P), member("p2", P, busy=5), member("d1", D)]
    assert place(members) == ("d1", "p1")
    assert place(members, ("p1", "d1")) == ("d1", "p2")


def test_a_decode_worker_without_a_partner_gives_way() -> None:
    members = [member("p1", P), member("d1", D), member("d2", D, busy=5)]
    assert place(members) == ("d1", "p1")
    assert place(members, ("p1", "d1")) == ("d2", "p1")


def test_a_partner_of_another_group_is_none() -> None:
    members = [
        member("p1", P),
        member("p2", P, compatibility="b"),
        member("d1", D),
        member("d2", D, busy=5, compatibility="b"),
    ]
    assert place(members, ("p1", "d1")) == ("d2", "p2")


def test_with_every_pair_barred_a_decode_worker_does_both_phases() -> None:
    members = [member("p1", P), member("d1", D, busy=5), member("d2", D)]
    assert place(members, ("p1", "d1"), ("p1", "d2")) == ("d2", None)


def test_with_every_pair_barred_an_aggregated_worker_comes_first() -> None:
    members = [member("p1", P), member("d1", D), member("a", A, busy=5)]
    assert place(members, ("p1", "d1")) == ("a", None)


def test_a_pair_of_workers_that_are_gone_bars_nobody() -> None:
    assert place([member("p1", P), member("d1", D)], ("p9", "d9"), ("p1", "d9")) == ("d1", "p1")


def test_a_full_decode_worker_is_waited_for_as_before() -> None:
    full = member("d1", D)
    Charge(full, kv_tokens=full.capacity_tokens)
    demand = Demand("demo", 100, 150)
    for barred in (frozenset(), frozenset({("p1", "d1")})):
        seen = [member("p1", P).seen(), full.seen()]
        decision = least_loaded(seen, replace(demand, barred=barred), 0, NO_CONTEXT)
        assert decision.placement is None


def test_where_canaries_try_no_request_does(struck: Quarantine) -> None:
    struck.by_canary = True
    assert struck.barred(SECONDS) == {PAIR}
    assert struck.tries(PAIR, SECONDS)
    struck.whole(PAIR, SECONDS)
    assert struck.barred(SECONDS) == frozenset()


def test_a_half_open_pair_is_tried_when_both_are_ready(struck: Quarantine) -> None:
    p, d = ready("p1", P), ready("d1", D)
    members = {"p1": p, "d1": d}
    assert half_open_pair(members, struck, SECONDS - 1) is None
    assert half_open_pair(members, struck, SECONDS) == (p, d)
    d.draining = True
    assert half_open_pair(members, struck, SECONDS) is None
    assert half_open_pair({"p1": p}, struck, SECONDS) is None
    # One has changed its role.
    assert half_open_pair({"p1": p, "d1": ready("d1", P)}, struck, SECONDS) is None


def test_a_pair_that_was_not_used_is_tried() -> None:
    quarantine = Quarantine(SECONDS)
    p, d = ready("p1", P), ready("d1", D)

    def found(now: float, *members: Member) -> tuple[Member, Member] | None:
        by_id = {m.worker_id: m for m in members}
        return unused_pair(by_id, quarantine, now, idle_s=10.0, draw=Random(1))

    assert found(0.0, p, d, ready("a", A)) == (p, d)
    quarantine.came(PAIR, 5.0)
    assert found(14.0, p, d) is None
    assert found(15.0, p, d) == (p, d)
    quarantine.strike(PAIR, 15.0)
    assert found(30.0, p, d) is None, "kept apart"
    assert found(30.0, p) is None
    other = replace(d.info, kv=replace(d.info.kv, compatibility="other")) if d.info.kv else d.info
    assert found(200.0, p, Member(other, lease_end=1.0, attached=True)) is None


def ready(worker_id: str, role: Role) -> Member:
    return Member(worker_info(worker_id, role), lease_end=1.0, attached=True)
