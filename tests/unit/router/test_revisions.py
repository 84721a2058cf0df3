"""Revisions of workers: new requests are split by weight, and stay with their revision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest, Unavailable, WorkerFailed
from pdserve.types import Role
from router.admission import NoRoom
from router.attempt.placer import Placer
from router.attempt.recovery import RetryPolicy
from router.fleet.registry import Fleet
from router.placement.decisions import DecisionLog, explained
from router.placement.policies import least_loaded
from router.placement.revisions import RevisionShares, draw, shares_of
from tests.support.router_stack import request, worker_info

if TYPE_CHECKING:
    from router.attempt.placer import Reservation

TWO_OF_EACH = ("p-r1", "d-r1", "p-r2", "d-r2")
IDS = [f"request-{n}" for n in range(2000)]
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}


class Pool:
    """Ready workers, named by role and revision, and a placer over them."""

    def __init__(self, *names: str, weights: dict[str, float] | None = None) -> None:
        self.fleet = Fleet(clock=lambda: 0.0)
        self.log = DecisionLog(10)
        self.shares = RevisionShares()
        self.placer = Placer(self.fleet, least_loaded, shares=self.shares, log=self.log)
        for name in names:
            role, _, revision = name.partition("-")
            self.fleet.register(worker_info(name, ROLES[role[0]], revision=revision))
            self.fleet.members[name].attached = True
        self.shares.set("demo", weights or {})

    def reserve(self, request_id: str = "r1") -> Reservation:
        return self.placer.reserve(self.placer.demand(request(request_id=request_id)))

    def reserve_again(self, revision: str, *failed: str) -> Reservation:
        """Place the next attempt of a request after these workers of its revision failed."""
        demand, retry = self.placer.demand(request()), RetryPolicy()
        demand.revision = revision
        for name in failed:
            retry.failed(name, WorkerFailed("died"), 0)
        step = retry.next(pair_helps=True)
        assert step is not None
        return self.placer.reserve_again(demand, step, cause="died")


def workers(reservation: Reservation) -> set[str]:
    found = (reservation.prefill, reservation.decode)
    return {x.worker_id for x in found if x is not None}


def test_requests_are_split_by_weight_and_every_router_draws_the_same() -> None:
    one, other = shares_of({"r1": 90, "r2": 10}), shares_of({"r2": 1, "r1": 9})
    drawn = [draw(one, x) for x in IDS]
    assert drawn == [draw(other, x) for x in IDS]
    assert 170 < drawn.count("r2") < 230


def test_a_revision_keeps_its_requests_when_its_weight_grows() -> None:
    before, after = shares_of({"r1": 95, "r2": 5}), shares_of({"r1": 50, "r2": 50})
    canary = [x for x in IDS if draw(before, x) == "r2"]
    assert canary
    assert all(draw(after, x) == "r2" for x in canary)


@pytest.mark.parametrize(
    ("weights", "field"),
    [({"r1": -1.0}, "weights.r1"), ({"r1": float("nan")}, "weights.r1"), ({"r1": 0.0}, "weights")],
)
def test_weights_that_are_none_are_refused(weights: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shares_of(weights)
    assert caught.value.field == field


async def test_a_request_uses_the_workers_of_one_revision_until_weights_are_cleared() -> None:
    pool = Pool(*TWO_OF_EACH, weights={"r1": 1, "r2": 1})
    seen = set()
    for n in range(20):
        reservation = pool.reserve(f"request-{n}")
        assert reservation is not None
        seen.add((frozenset(workers(reservation)), reservation.revision))
        reservation.release()
    assert seen == {(frozenset({f"p-{x}", f"d-{x}"}), x) for x in ("r1", "r2")}
    # The least loaded of each role.
    members = pool.fleet.members
    members["p-r1"].placed.outstanding_tokens = members["d-r2"].placed.reserved_blocks = 50
    pool.shares.set("demo", {})
    assert workers(pool.reserve()) == {"p-r2", "d-r1"}


async def test_a_revision_without_workers_spills_over_and_explain_shows_it() -> None:
    pool = Pool(*TWO_OF_EACH, weights={"r1": 1, "r2": 9, "r3": 90})
    for name in ("p-r2", "d-r2"):
        pool.fleet.renew(name, "e1", load=None, draining=True)
    reservation = pool.reserve()
    assert workers(reservation) == {"p-r1", "d-r1"}
    (told,) = explained(pool.log.of("r1")).decisions
    assert (told.revision, told.spilled_from) == ("r1", "r3")


async def test_a_full_revision_waits_and_does_not_spill_over() -> None:
    pool = Pool("a-r1", "a-r2", weights={"r1": 0, "r2": 1})
    held = pool.fleet.members["a-r2"]
    held.placed.reserved_blocks = held.info.total_blocks
    with pytest.raises(NoRoom):
        pool.reserve()


async def test_a_retry_stays_with_the_revision_while_it_has_workers() -> None:
    pool = Pool(*TWO_OF_EACH, "d2-r2", weights={"r1": 99, "r2": 1})
    assert workers(pool.reserve_again("r2")) == {"p-r2", "d-r2"}
    assert workers(pool.reserve_again("r2", "d-r2")) == {"p-r2", "d2-r2"}
    # Its decode workers may be what fails.
    assert workers(pool.reserve_again("r2", "d-r2", "d2-r2")) == {"p-r1", "d-r1"}


async def test_live_kv_and_parallel_answers_stay_with_the_revision_of_the_worker() -> None:
    pool = Pool(*TWO_OF_EACH, "d2-r2", weights={"r1": 99, "r2": 1})
    demand = pool.placer.demand(request())
    demand.revision = "r1"
    moved = pool.placer.reserve_live(demand, "d-r2", cause="drain")
    assert moved.decode.worker_id == "d2-r2"
    child = pool.placer.reserve_on(pool.fleet.members["d-r2"], demand)
    assert (child.decode.worker_id, child.revision) == ("d-r2", "r2")
    with pytest.raises(Unavailable):
        pool.placer.reserve_live(demand, "d-r1", cause="drain")
