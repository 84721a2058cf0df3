"""Whether one more decodes on a worker and the gaps between tokens stay as promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.step_moments import StepRecorder, StepShape
from pdserve.types import GenerateRequest, Role, SamplingParams, WorkerLoad
from router.cost.book import CostBook
from router.cost.gaps import MARGIN, context_of, takes_one_more
from router.cost.objective import Slo
from router.cost.step_model import StepModel
from router.fleet.member import Member
from router.fleet.registry import Fleet
from router.placement.context import PlacementContext
from router.placement.policies.by_name import POLICIES
from router.placer import Placer
from router.retry import Constraints, RetryStep
from tests.fakes import worker_info

if TYPE_CHECKING:
    from router.placement.values import Demand
    from router.placer import Reservation

# A step takes 10 ms, 2 ms for each that decodes, and 10 µs for each token of their context.
STEPS = StepModel((0.01, 0.0, 0.0, 0.02, 0.1), 0.0, 100.0, 0, 0.0)


def member(load: WorkerLoad | None = None) -> Member:
    found = Member(worker_info("d", Role.DECODE), 1e9, attached=True)
    found.load = load
    return found


@pytest.mark.parametrize(
    ("placed", "decoding", "limit_s", "takes"),
    [
        # With n that decode, of 100 tokens each, a step takes 10 ms and 3 ms a request.
        (9, 1.0, 0.040 / MARGIN + 0.0001, True),
        (10, 1.0, 0.040 / MARGIN + 0.0001, False),
        # Half of those that were placed decode; the others wait for their prompts.
        (18, 0.5, 0.040 / MARGIN + 0.0001, True),
        (20, 0.5, 0.040 / MARGIN + 0.0001, False),
        # A limit that one alone keeps barely, or not at all: some may decode together.
        (5, 1.0, 0.010, False),
        (4, 1.0, 0.010, True),
        (0, 1.0, 0.001, True),
    ],
)
def test_as_many_decode_together_as_keep_the_gaps(
    placed: int, decoding: float, limit_s: float, takes: bool
) -> None:
    worker = member()
    worker.outstanding_requests = placed
    assert takes_one_more(STEPS, worker.seen(), 100.0, decoding, limit_s) is takes


def test_context_is_what_the_worker_says_of_those_that_hold_any() -> None:
    assert context_of(member().seen(), 70.0) == 70.0
    info = member().info
    idle = WorkerLoad(0, 0, 0.0, info.total_blocks)
    assert context_of(member(idle).seen(), 70.0) == 70.0
    # Three hold 24 blocks: one of them waits for its KV.
    busy = WorkerLoad(1, 2, 0.0, info.total_blocks - 24)
    assert context_of(member(busy).seen(), 70.0) == 8 * info.block_size


class Rig:
    """A prefill and a decode worker or several, of whose steps this is known, and a placer."""

    def __init__(self, tpot_s: float, *decodes: str, policy: str = "least_loaded") -> None:
        self.fleet = Fleet(router_id="r", clock=lambda: 0.0)
        pool = self.fleet.pool
        recorder = StepRecorder()
        for batch in (1, 2, 4, 8):
            for context in (50, 100, 200):
                shape = StepShape(decode_reqs=batch, decode_kv_tokens=batch * context)
                for _ in range(4):
                    recorder.observe(shape, STEPS.step_s(shape), 0.0)
        workers = {"p": Role.PREFILL, **dict.fromkeys(decodes or ("d",), Role.DECODE)}
        for name, role in workers.items():
            pool.register(worker_info(name, role), 0.0)
            pool.attached(pool.members[name])
            pool.members[name].steps = recorder.moments(0.0)
        costs = CostBook(pool, Slo(tpot_s=tpot_s, reject_factor=1.0), lambda: 0.0)
        context = PlacementContext(None, costs)
        self.placer = Placer(self.fleet, POLICIES[policy], context, costs=costs)

    def demand(self, tokens: int = 8) -> Demand:
        sampling = SamplingParams(max_tokens=tokens)
        return self.placer.demand(GenerateRequest("r", "demo", (1,) * 100, sampling))

    def book(self, tokens: int = 8) -> Reservation | None:
        return self.placer.reserve(self.demand(tokens))


def test_who_would_make_the_gaps_too_long_waits_until_another_has_ended() -> None:
    rig = Rig(0.025 / MARGIN + 0.0001)
    bookings = [rig.book() for _ in range(5)]
    held = [booking for booking in bookings if booking is not None]
    assert len(held) == 5, "a step of five takes 25 ms"
    assert rig.book() is None
    assert rig.book(tokens=1) is not None, "of one that does not decode nobody has a gap"
    again = rig.placer.reserve_again(
        rig.demand(), Constraints(RetryStep.OTHER_PREFILL), cause="it failed"
    )
    assert again.decode is held[0].decode, "one that is under way does not wait"
    again.release()
    held[0].release()
    assert rig.book() is not None


def test_it_goes_to_one_that_takes_one_more_whomever_the_policy_picks() -> None:
    rig = Rig(0.025 / MARGIN + 0.0001, "d", "e", policy="round_robin")
    bookings = [booking for booking in (rig.book() for _ in range(10)) if booking is not None]
    assert len(bookings) == 10
    assert rig.book() is None
    for booking in [x for x in bookings if x.decode.worker_id == "e"][:2]:
        booking.release()
    found = [rig.book(), rig.book()]
    assert [x and x.decode.worker_id for x in found] == ["e", "e"]
    assert rig.book() is None


def test_without_a_promise_nobody_waits_for_gaps() -> None:
    rig = Rig(0.0)
    assert all(rig.book() is not None for _ in range(8))
