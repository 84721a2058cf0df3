"""Of a large pool a booking looks at a part; what it decides must be as good as of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.types import GenerateRequest, Role, SamplingParams
from router.booking import Booker
from router.cost.book import CostBook
from router.cost.objective import Slo
from router.decisions.log import DecisionLog
from router.fleet import Fleet
from router.large_pool import LARGE
from router.placement.context import PlacementContext
from router.placement.pickers import MOST_CACHED, MOST_SCORED
from router.placement.policies.by_name import POLICIES
from router.prefill_queue import PrefillQueue
from tests.fakes import worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from router.booking import Booking
    from router.member import Member
    from router.placement.values import Candidate, Demand

COUNT = LARGE  # of each role


class Cached:
    """A lookup that counts how often it is asked."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.asked = 0

    def cached_tokens(self, _demand: Demand) -> Mapping[str, int]:
        self.asked += 1
        return self.tokens


class Pool:
    """As many workers of each role, all ready, and a booker over them."""

    def __init__(
        self, policy: str = "least_loaded", cached: Cached | None = None, chunks: int = 2
    ) -> None:
        self.now = 0.0
        self.fleet = Fleet(router_id="r", clock=lambda: self.now)
        pool = self.fleet.pool
        for i in range(COUNT):
            for role in (Role.PREFILL, Role.DECODE):
                pool.register(worker_info(f"{role[0]}{i}", role), 0.0)
        self.members = list(pool.members.values())
        for member in self.members:
            pool.attached(member)
        context = PlacementContext(cached)
        queue = PrefillQueue(chunks)
        self.log = DecisionLog(64)
        self.booker = Booker(
            self.fleet, POLICIES[policy], context, log=self.log, prefill_queue=queue
        )

    def of(self, role: Role) -> list[Member]:
        return [m for m in self.members if m.info.role is role]

    def demand(self, prompt: int = 40, tokens: int = 8) -> Demand:
        sampling = SamplingParams(max_tokens=tokens)
        return self.booker.demand(GenerateRequest("r", "demo", (1,) * prompt, sampling))

    def book(self, prompt: int = 40) -> Booking | None:
        return self.booker.book(self.demand(prompt))


def test_a_decision_looks_at_a_part_that_does_not_grow() -> None:
    pool = Pool()
    chosen = set()
    for _ in range(60):
        booking = pool.book()
        assert booking is not None
        assert len(booking.decision.candidates) == 2 * MOST_SCORED
        chosen.add(booking.decode.worker_id)
    assert len(chosen) > 50, "one draw is not like another"
    (logged,) = pool.log.all()
    assert {x.not_drawn for x in logged.decisions} == {2 * (COUNT - MOST_SCORED)}


def test_round_robin_takes_turns_over_all() -> None:
    pool = Pool("round_robin")
    found = [pool.book() for _ in range(COUNT)]
    assert {b.decode.worker_id for b in found if b} == {m.worker_id for m in pool.of(Role.DECODE)}


def test_the_one_that_has_room_is_found_and_nobody_is_asked_twice() -> None:
    pool = Pool()
    full = pool.of(Role.DECODE)
    for member in full:
        member.reserved_blocks = member.info.total_blocks
    full[-1].reserved_blocks = 0
    booking = pool.book()
    assert booking is not None
    assert booking.decode is full[-1]
    full[-1].reserved_blocks = full[-1].info.total_blocks
    assert pool.book() is None
    large, demand = pool.booker._large_pool, pool.demand()
    assert large.lacks_room(demand)
    # Whoever is freed is found at once; so is one who comes back.
    full[7].reserved_blocks = 0
    assert not large.lacks_room(demand)
    again = pool.book()
    assert again is not None
    assert again.decode is full[7]
    full[7].reserved_blocks = full[7].info.total_blocks
    full[9].draining = True
    full[9].reserved_blocks = 0
    assert pool.book() is None
    full[9].draining = False
    last = pool.book()
    assert last is not None
    assert last.decode is full[9]


def test_prompts_wait_until_an_engine_takes_them() -> None:
    pool = Pool(chunks=1)
    prefills = pool.of(Role.PREFILL)
    for member in prefills:
        member.outstanding_tokens = 2040
    assert pool.book() is None
    assert pool.booker._large_pool.lacks_prefill(pool.demand())
    assert pool.book(prompt=5) is not None, "a shorter one is taken"
    prefills[3].outstanding_tokens = 0
    booking = pool.book()
    assert booking is not None
    assert booking.prefill is prefills[3]


def test_that_nobody_takes_one_more_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = Pool(), list[str]()
    full = set(pool.of(Role.DECODE))
    for member in full:
        member.reserved_blocks = member.info.total_blocks // 2
    costs = CostBook(pool.fleet.pool, Slo(reject_factor=1.0), lambda: pool.now)

    def takes_one_more(_demand: Demand, decode: Candidate) -> bool:
        asked.append(decode.worker_id)
        return all(m.worker_id != decode.worker_id for m in full)

    monkeypatch.setattr(costs, "takes_one_more", takes_one_more)
    pool.booker = Booker(
        pool.fleet, POLICIES["least_loaded"], PlacementContext(None, costs), costs, log=pool.log
    )
    assert pool.book() is None
    assert len(set(asked)) == COUNT
    asked.clear()
    assert [pool.book() for _ in range(5)] == [None] * 5
    assert asked == []
    # An answer ends somewhere: that worker alone is asked, and takes the next one.
    changed = pool.of(Role.DECODE)[7]
    changed.reserved_blocks = 0
    assert pool.book() is None, "it was asked"
    assert set(asked) == {changed.worker_id}
    full.remove(changed)
    asked.clear()
    booking = pool.book()
    assert booking is not None, asked
    assert booking.decode is changed


def test_whoever_comes_ends_a_shortage() -> None:
    pool = Pool()
    for member in pool.of(Role.DECODE):
        member.reserved_blocks = member.info.total_blocks
    assert pool.book() is None
    pool.fleet.pool.register(worker_info("new", Role.DECODE), 0.0)
    pool.fleet.pool.attached(pool.fleet.pool.members["new"])
    booking = pool.book()
    assert booking is not None
    assert booking.decode.worker_id == "new"


def test_those_with_most_of_the_prompt_are_always_drawn() -> None:
    cached = Cached({f"p{i}": 8 + i for i in range(MOST_CACHED + 4)} | {"gone": 40})
    pool = Pool("prefix_aware", cached)
    pool.of(Role.PREFILL)[MOST_CACHED + 3].draining = True
    for turn in range(5):
        booking = pool.book()
        assert booking is not None
        drawn = {c.worker_id for c in booking.decision.candidates}
        assert {f"p{i}" for i in range(3, MOST_CACHED + 3)} <= drawn
        assert cached.asked == turn + 1
        booking.release()
