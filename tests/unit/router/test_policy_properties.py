"""What holds of every policy, for any pool and any demand."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import Unavailable
from pdserve.kv_compatibility import exchange
from pdserve.types import Role, WorkerLoad
from router.placement.policies import POLICIES
from router.placement.values import Candidate, Decision, Demand, MemberState, PlacementContext
from tests.support.placement import FixedLookups, names, worker

NUMBERS = range(7)
IDS = tuple(f"{role}{i}" for i in NUMBERS for role in "pda")


@st.composite
def members(draw: st.DrawFn) -> list[Candidate]:
    found = []
    for number in NUMBERS[: draw(st.integers(1, len(NUMBERS)))]:
        blocks = draw(st.sampled_from([4, 100]))
        free = draw(st.integers(0, blocks))
        waiting, running = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        member = worker(
            f"{draw(st.sampled_from('pda'))}{number}",
            draw(st.sampled_from([None, WorkerLoad(waiting, running, 0.5, free)])),
            compatibility=draw(st.sampled_from(["x", "x", "y"])),
            blocks=blocks,
            attached=draw(st.sampled_from([True, True, True, False])),
            draining=draw(st.sampled_from([False, False, False, True])),
            outstanding_requests=draw(st.integers(0, 20)),
            outstanding_tokens=draw(st.integers(0, 5000)),
            reserved_blocks=draw(st.sampled_from([0, blocks // 2, blocks])),
        )
        found.append(member.snapshot())
    return found


ALL_PAIRS = tuple((f"p{i}", f"d{j}") for i, j in product(NUMBERS, NUMBERS))
# A bit for each pair: one draw, where a set would take one for each of its members.
excluded = st.one_of(st.just(0), st.just(-1), st.integers(0, (1 << len(ALL_PAIRS)) - 1)).map(
    lambda bits: frozenset(pair for i, pair in enumerate(ALL_PAIRS) if bits >> i & 1)
)
demands = st.builds(
    Demand,
    model=st.just("demo"),
    prompt_tokens=st.sampled_from([1, 40, 100]),
    kv_tokens=st.sampled_from([101, 600, 1600]),
    prefill_only=st.sampled_from([False, False, True]),
    avoid=st.frozensets(st.sampled_from(IDS), max_size=6),
    excluded=excluded,
)
lookups = st.none() | st.builds(
    FixedLookups, st.dictionaries(st.sampled_from(IDS), st.integers(0, 200), max_size=9)
)


def said(decision: Decision) -> object:
    """Return the content of a decision by worker id."""
    boards = [b and [b.candidates, b.columns] for b in (decision.prefill, decision.decode)]
    return (
        names(decision.placement),
        boards,
        {c.worker_id: total for c, total in decision.totals.items()},
    )


def check_scores(decision: Decision) -> None:
    for board in (decision.prefill, decision.decode):
        if board is not None:
            for column in (*board.columns, board.totals.values()):
                assert all(0.0 <= x <= 1.0 + 1e-9 for x in column)
    assert all(0.0 <= x <= 1.0 + 1e-9 for x in decision.totals.values())


def usable(candidates: list[Candidate], demand: Demand) -> list[Candidate]:
    """Ready, large enough, and not to be avoided where another of its role is."""
    large = [
        c
        for c in candidates
        if c.state is MemberState.READY
        and c.info.total_blocks * c.info.block_size > demand.prompt_tokens
    ]
    return [
        c
        for c in large
        if c.worker_id not in demand.avoid
        or not any(o.role is c.role and o.worker_id not in demand.avoid for o in large)
    ]


def may_decode(kept: list[Candidate], demand: Demand) -> list[Candidate]:
    """Return workers with room that could get KV if no pair were excluded."""
    prefills = [c for c in kept if c.role is Role.PREFILL]
    return [
        c
        for c in kept
        if c.has_room(demand)
        and (
            c.role is Role.AGGREGATED
            or (c.role is Role.DECODE and any(exchange(p.kind, c.kind) for p in prefills))
        )
    ]


def open_pairs(kept: list[Candidate], demand: Demand) -> list[tuple[Candidate, Candidate]]:
    return [
        (p, d)
        for p, d in product(kept, kept)
        if p.role is Role.PREFILL
        and d.role is Role.DECODE
        and exchange(p.kind, d.kind)
        and d.has_room(demand)
        and (p.worker_id, d.worker_id) not in demand.excluded
    ]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(members(), demands, lookups, st.integers(0, 1 << 40))
def test_a_policy_keeps_to_what_it_may(
    name: str, candidates: list[Candidate], demand: Demand, lookup: FixedLookups | None, turn: int
) -> None:
    context = PlacementContext(lookup)
    kept = usable(candidates, demand)
    try:
        decision = POLICIES[name](candidates, demand, turn, context)
    except Unavailable:
        roles = {c.role for c in kept}
        assert Role.AGGREGATED not in roles
        if demand.prefill_only:
            assert Role.PREFILL not in roles
        else:
            assert not any(
                p.role is Role.PREFILL and d.role is Role.DECODE and exchange(p.kind, d.kind)
                for p, d in product(kept, kept)
            )
        return
    check_scores(decision)
    assert said(POLICIES[name](candidates, demand, turn, context)) == said(decision)
    placement = decision.placement
    if demand.prefill_only:
        alone = [c for c in kept if c.role is Role.PREFILL]
        alone += [c for c in kept if c.role is Role.AGGREGATED and c.has_room(demand)]
        assert (placement is None) == (not alone)
        assert placement is None or (placement.decode in alone and placement.prefill is None)
        return
    if placement is None:
        assert may_decode(kept, demand) == []
        return
    assert placement.decode in may_decode(kept, demand)
    if placement.prefill is not None:
        assert (placement.prefill, placement.decode) in open_pairs(kept, demand)
    elif placement.decode.role is Role.DECODE and name != "always_aggregated":
        assert open_pairs(kept, demand) == []
        assert not any(c.role is Role.AGGREGATED for c in may_decode(kept, demand))
