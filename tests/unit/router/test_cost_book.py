"""Predictions of a router: from what its workers say of their steps, and from what it placed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.step_moments import StepMoments, StepRecorder, StepShape
from pdserve.types import Receipt, Role, Usage, WorkerLoad
from router.cost.book import PACE_S, PRIOR_S, REFIT_S, CostBook
from router.cost.objective import EARLY, SPREAD, Slo
from router.cost.outcome import Outcome, outcome_of
from router.cost.pace import MIN_OUTCOMES
from router.cost.transfer_model import MIN_TRANSFERS, TransferModel
from router.fleet.pool import WorkerPool
from router.placement.context import PlacementContext
from router.placement.policies.slo_aware import slo_aware
from router.placement.values import Decision, Demand, Placement
from tests.fakes import worker_info

if TYPE_CHECKING:
    from router.fleet.member import Member

STEP_S, TOKEN_S, REQUEST_S = 0.010, 0.001, 0.001
TRANSFER_S = 0.005
SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def steps(slower: float = 1.0) -> StepMoments:
    recorder = StepRecorder()
    for i in range(40):
        tokens, reqs = 20 * (i % 7 + 1), i % 5 + 1
        for shape in (StepShape(tokens, 0.0, tokens), StepShape(decode_reqs=reqs)):
            took = STEP_S + TOKEN_S * shape.prefill_tokens + REQUEST_S * shape.decode_reqs
            recorder.observe(shape, took * slower, 0.0)
    return recorder.moments(0.0)


class Rig:
    """A pool of one prefill and one decode worker, on a clock that the test sets."""

    def __init__(self, *, knows: bool = True) -> None:
        self.now = 1000.0
        self.pool = WorkerPool(lease_s=1e9)
        self.ratios: list[tuple[str, str, float]] = []
        self.book = CostBook(
            self.pool, SLO, lambda: self.now, on_ratio=lambda *x: self.ratios.append(x)
        )
        self.prefill, self.decode = self.add("p0", Role.PREFILL), self.add("d0", Role.DECODE)
        if knows:
            self.prefill.steps = self.decode.steps = steps()
            for _ in range(int(MIN_TRANSFERS) + 1):
                self.book.transfers.observe("demo", ("p0", "d0"), 100, TRANSFER_S)

    def add(self, worker_id: str, role: Role) -> Member:
        self.pool.register(worker_info(worker_id, role), self.now)
        member = self.pool.members[worker_id]
        self.pool.attached(member)
        member.load = WorkerLoad(0, 0, 0.0, 100)
        return member

    def predict(self, tokens: int = 100, *, local: bool, cached: int = 0) -> float | None:
        found = self.book.predict(
            Demand("demo", tokens, tokens + 10),
            None if local else self.prefill.seen(),
            self.decode.seen(),
            {"p0": cached, "d0": cached},
        )
        return None if found is None else found.ttft_s

    def harm(self, tokens: int = 100) -> float:
        """What prefill at decode costs beyond the request's own waiting."""
        found = self.book.predict(Demand("demo", tokens, tokens + 10), None, self.decode.seen(), {})
        assert found is not None
        own = SLO.first_cost_s(found.ttft_s) + SLO.gap_cost_s(found.itl_s)
        return found.cost_s - own

    def decide(self, tokens: int = 100) -> Decision:
        decision = slo_aware(
            self.pool.candidates("demo"),
            Demand("demo", tokens, tokens + 10),
            0,
            PlacementContext(cost=self.book),
        )
        self.book.decided(decision)
        return decision

    def goes_local(self, tokens: int = 100) -> bool:
        placement = self.decide(tokens).placement
        assert placement is not None
        return placement.prefill is None


def test_the_first_token_waits_for_the_prompt_and_for_what_is_ahead() -> None:
    rig = Rig()
    alone = STEP_S + 100 * TOKEN_S
    assert rig.predict(local=False) == pytest.approx(alone, rel=0.02)
    assert rig.predict(local=True) == pytest.approx(alone, rel=0.02)
    assert rig.predict(local=False, cached=60) == pytest.approx(STEP_S + 40 * TOKEN_S, rel=0.02)
    leave = rig.book.enter("p0", 200, 0)
    behind = STEP_S + 300 * TOKEN_S
    assert rig.predict(local=False) == pytest.approx(behind, rel=0.02)
    assert rig.predict(local=True) == pytest.approx(alone, rel=0.02)
    # What is computed of it meanwhile is not waited for; but it never counts for more than all.
    rig.now += 0.1
    assert rig.predict(local=False) == pytest.approx(behind - 0.1, rel=0.02)
    rig.now += 60.0
    assert rig.predict(local=False) == pytest.approx(alone, rel=0.15)
    leave()
    leave()
    assert len(rig.book.backlog) == 0
    assert rig.predict(local=False) == pytest.approx(alone, rel=0.02)


def test_a_prompt_beside_running_streams_costs_each_of_them_its_time() -> None:
    rig = Rig()
    rig.decode.load = WorkerLoad(0, 4, 0.1, 90)
    found = rig.book.predict(Demand("demo", 100, 110), None, rig.decode.seen(), {})
    assert found is not None
    base = STEP_S + 4 * REQUEST_S
    assert found.itl_s == pytest.approx(base, rel=0.05)
    assert found.itl_harm_s == pytest.approx(4 * 100 * TOKEN_S, rel=0.02)
    ttft = base + 100 * TOKEN_S
    assert found.ttft_s == pytest.approx(ttft, rel=0.05)
    # On average over the gaps that an answer has.
    longer = base + 100 * TOKEN_S / rig.book.stalls.gaps("demo")
    each = SLO.gap_cost_s(longer) - SLO.gap_cost_s(base)
    own = SLO.first_cost_s(ttft) + SLO.gap_cost_s(base)
    assert found.cost_s == pytest.approx(own + 4 * each, rel=0.05)


def test_a_worker_without_a_free_seat_is_not_predicted_to_prefill() -> None:
    rig = Rig()
    seats = rig.decode.info.max_num_seqs
    rig.decode.load = WorkerLoad(0, seats, 0.1, 90)
    assert rig.predict(local=True) is None
    assert rig.predict(local=False) is not None


def test_a_prompt_beside_many_keeps_others_from_their_seats() -> None:
    rig = Rig()
    rig.decode.load = WorkerLoad(0, 4, 0.1, 90)
    seats, stall_s = rig.decode.info.max_num_seqs, 100 * TOKEN_S
    rig.decode.outstanding_requests = seats // 2
    before = rig.harm()
    rig.decode.outstanding_requests = seats
    # With all taken, whoever comes waits for a seat by as much longer as each is held.
    steepest = EARLY + (1 - EARLY) / (2 * SPREAD)
    assert rig.harm() - before == pytest.approx(seats * stall_s * steepest, rel=0.05)
    # Blocks are seats too.
    rig.decode.outstanding_requests = 4
    rig.decode.reserved_blocks = rig.decode.info.total_blocks
    assert rig.harm() - before == pytest.approx(4 * stall_s * steepest, rel=0.05)


def test_nothing_is_predicted_before_enough_is_known() -> None:
    rig = Rig(knows=False)
    assert rig.predict(local=True) is None
    assert rig.predict(local=False) is None
    rig.decode.steps = rig.prefill.steps = steps()
    rig.now += max(REFIT_S, PRIOR_S)
    assert rig.predict(local=True) is not None
    assert rig.predict(local=False) is None  # no transfer was seen
    for _ in range(int(MIN_TRANSFERS) + 1):
        rig.book.transfers.observe("demo", ("p0", "d0"), 100, TRANSFER_S)
    assert rig.predict(local=False) is not None


def test_prefill_stays_apart_while_it_harms_and_comes_home_when_it_waits() -> None:
    rig = Rig()
    assert not rig.goes_local()
    # Nobody is harmed on an idle decode worker, and prefill's queue is long.
    leave = rig.book.enter("p0", 2000, 0)
    assert rig.goes_local()
    # Many are harmed: the queue is the lesser evil.
    rig.decode.load = WorkerLoad(0, 7, 0.1, 90)
    rig.prefill.load = WorkerLoad(0, 0, 0.0, 100)
    leave()
    assert not rig.goes_local()


def test_prompts_that_were_taken_home_count_against_the_next() -> None:
    rig = Rig()
    rig.decode.load = WorkerLoad(0, 3, 0.1, 90)
    before = rig.harm()
    assert before < 0.05
    demand, here = Demand("demo", 100, 110), Placement(rig.decode.seen())
    taken = Decision("slo_aware", (rig.decode.seen(),), demand, 0, here)
    for _ in range(6):
        rig.book.decided(taken)
    # Alone each was harmless; together they would break what was promised to those who decode.
    assert rig.harm() > 5 * before
    rig.now += 10.0
    assert rig.harm() == pytest.approx(before, rel=0.05)


def test_a_stall_counts_for_those_who_come_meanwhile() -> None:
    rig = Rig()
    rig.decode.load = WorkerLoad(0, 1, 0.1, 90)
    rig.decode.outstanding_requests = 1
    before, stall_s = rig.harm(), 100 * TOKEN_S
    rig.decode.outstanding_requests = 4
    # Nobody knows how fast prompts are computed: one comes.
    one = rig.harm() - before
    assert one > 0
    for _ in range(MIN_OUTCOMES):
        rig.book.answered(None, outcome(rig, prefill_s=stall_s / 2))
    rig.now += PACE_S
    rig.decode.outstanding_requests = 1
    before = rig.harm()
    rig.decode.outstanding_requests = 4
    two = rig.harm() - before
    # Of the three that wait two come in that time, and meet half of it in the mean.
    gaps = rig.book.stalls.gaps("demo")
    base = STEP_S + REQUEST_S
    each = SLO.gap_cost_s(base + stall_s / 2 / gaps) - SLO.gap_cost_s(base)
    assert two == pytest.approx(2 * each, rel=0.05)


def test_who_is_late_anyway_does_not_make_others_late() -> None:
    rig = Rig()
    rig.book.enter("p0", 5000, 0)
    rig.book.enter("d0", 5000, 0)
    rig.decode.load = WorkerLoad(0, 6, 0.1, 90)
    # Both ways miss the first token's limit many times over, and the decode worker's queue is no
    # longer than prefill's: nothing is won by stalling those who decode.
    assert not rig.goes_local()


def test_near_equal_choices_do_not_alternate() -> None:
    """The queue at prefill wavers about where both are alike: a way is kept until it is clear."""
    rig = Rig()

    def wavering(low: int, high: int) -> list[bool]:
        ways = []
        for i in range(12):
            leave = rig.book.enter("p0", high if i % 2 else low, 0)
            ways.append(rig.goes_local())
            leave()
        return ways

    assert wavering(1, 6) == [False] * 12
    leave = rig.book.enter("p0", 400, 0)
    assert rig.goes_local()
    leave()
    # The very same queues, and the other way is the one that is kept.
    assert wavering(1, 6) == [True] * 12


def test_a_habit_belongs_to_a_size() -> None:
    rig = Rig()
    demand = Demand("demo", 100, 110)
    placement = Placement(rig.decode.seen())
    predictions = [
        rig.book.predict(demand, way, rig.decode.seen(), {}) for way in (None, rig.prefill.seen())
    ]
    known = tuple(x for x in predictions if x is not None)
    rig.book.decided(Decision("slo_aware", [], demand, 0, placement, predictions=known))
    again = rig.book.predict(replace(demand, prompt_tokens=127), None, rig.decode.seen(), {})
    other = rig.book.predict(replace(demand, prompt_tokens=128), None, rig.decode.seen(), {})
    assert again is not None
    assert other is not None
    assert (again.is_habit, other.is_habit) == (True, False)


def test_the_prediction_of_a_decision_is_kept_with_it_whatever_the_policy() -> None:
    rig = Rig()
    decision = rig.decide()
    assert decision.placement is not None
    prediction = rig.book.decided(decision)
    assert prediction in decision.predictions
    silent = replace(decision, predictions=())
    assert rig.book.decided(silent) == prediction
    single = replace(silent, demand=replace(decision.demand, prefill_only=True))
    assert rig.book.decided(single) is None


def outcome(rig: Rig, **changes: object) -> Outcome:
    receipt = Receipt(
        prefill_s=0.1,
        exposed_transfer_s=0.01,
        transport="shm",
        prefill_worker="p0",
        decode_worker="d0",
    )
    found = outcome_of("demo", Usage(100, 11), receipt, ended_at=rig.now, ttft_s=0.2, e2e_s=0.41)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_predictions_are_held_against_what_came() -> None:
    rig = Rig()
    prediction = rig.book.decided(rig.decide())
    assert prediction is not None
    came = outcome(rig)
    assert came.tpot_s == pytest.approx(0.02)
    assert came.placed_at == pytest.approx(rig.now - 0.41)
    for _ in range(10):
        rig.book.answered(prediction, came)
    ratios = {kind: ratio for _, kind, ratio in rig.ratios}
    assert ratios["ttft"] == pytest.approx(prediction.ttft_s / 0.2)
    assert ratios["transfer"] == pytest.approx(TRANSFER_S / 0.01, rel=0.05)
    quantiles = rig.book.accuracy.quantiles("demo")
    assert quantiles["ttft"].count == 10
    assert quantiles["ttft"].p10 == quantiles["ttft"].p90 == pytest.approx(ratios["ttft"])
    assert rig.book.accuracy.quantiles("other") == {}
    rig.book.answered(None, outcome(rig, exposed_transfer_s=None))
    assert len(rig.ratios) == 40


def test_workers_that_left_are_forgotten() -> None:
    rig = Rig()
    assert rig.predict(local=True) is not None
    decode = rig.decode.seen()
    del rig.pool.members["d0"]
    assert rig.book.predict(Demand("demo", 100, 110), None, decode, {}) is None
    assert rig.book.step_model("d0") is None


def test_a_transfer_is_a_base_and_a_rate() -> None:
    model = TransferModel()
    for i in range(60):
        tokens = 100 * (i % 10 + 1)
        model.observe("m", ("p", "d"), tokens, 0.002 + 1e-5 * tokens)
    assert model.exposed_s("m", ("p", "d"), 500) == pytest.approx(0.007, rel=0.05)
    # A pair that is new is like the others of its model; one of another model is unknown.
    assert model.exposed_s("m", ("p", "d2"), 500) == pytest.approx(0.007, rel=0.05)
    assert model.exposed_s("other", ("x", "y"), 500) is None
    model.observe("m", ("p", "d"), 500, 30.0)
    assert (model.exposed_s("m", ("p", "d"), 500) or 0.0) < 0.02


def test_pairs_that_are_remembered_are_bounded() -> None:
    model = TransferModel(max_pairs=3)
    for i in range(10):
        model.observe("m", ("p", f"d{i}"), 100, 0.01)
    assert len(model) == 3
