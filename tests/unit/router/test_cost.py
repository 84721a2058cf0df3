"""Cost model: step costs are found again, and predictions follow from them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdserve.config import QueueConfig, SloConfig
from pdserve.observe.step_costs import Moments, StepMoments, StepRecorder, StepShape, fit_costs
from pdserve.types import EngineLimits, Receipt, Role, Usage, WorkerLoad
from router.admission import AdmissionController
from router.fleet.billing import Billing
from router.fleet.peers import RegionPeers
from router.fleet.registry import Fleet
from router.placement.cost import (
    FAR_TOKENS,
    FETCH_S,
    FETCH_TOKEN_S,
    MAX_EXTRAPOLATION,
    MIN_SAMPLES,
    REFIT_S,
    RELEARN_S,
    Batch,
    CostModel,
    Latency,
    QueuedPrompt,
    fit_steps,
    is_clearly_cheaper,
    prompt_work,
)
from router.placement.policies import POLICIES
from router.placement.values import Decision, Demand, Placement, PlacementContext
from router.virtual.forecast import Forecast
from tests.support.router_stack import worker_info

if TYPE_CHECKING:
    from router.fleet.member import Member
    from router.placement.values import PrefixFetch
    from router.virtual.rules import ModelFacts

STEP_S, TOKEN_S, REQUEST_S, TRANSFER_S = 0.010, 0.001, 0.001, 0.005
NOTHING = StepMoments()


def seconds(costs: tuple[float, ...], shape: StepShape) -> float:
    step, token, pair, request, context = costs
    return (
        step
        + token * shape.prefill_tokens
        + pair * shape.prefill_pairs
        + request * shape.decode_reqs
        + context * shape.decode_kv_tokens
    )


@settings(max_examples=10, deadline=None)
@given(
    costs=st.tuples(
        st.floats(1e-3, 3e-2),
        st.floats(1e-5, 1e-3),
        st.floats(1e-9, 1e-7),
        st.floats(5e-5, 3e-3),
        st.floats(1e-9, 1e-6),
    ),
    seed=st.integers(0, 1000),
)
def test_step_costs_are_found_again_under_noise(costs: tuple[float, ...], seed: int) -> None:
    draw, recorder = random.Random(seed), StepRecorder()
    shapes = []
    for i in range(200):
        tokens, ahead = draw.choice((30, 200, 700, 2048)), draw.randrange(0, 6000)
        shapes.append(StepShape(tokens, tokens * (ahead + tokens / 2), ahead + tokens))
        reqs = draw.randrange(1, 48)
        shapes.append(
            StepShape(decode_reqs=reqs, decode_kv_tokens=reqs * draw.randrange(100, 4000))
        )
        for shape in shapes[-2:]:
            recorder.observe(shape, seconds(costs, shape) * draw.lognormvariate(0, 0.1), i * 0.05)
    model = fit_steps(recorder.moments(10.0), NOTHING)
    assert all(x >= 0 for x in model.coefficients)
    for shape in shapes[:40]:
        found = sum(c * x for c, x in zip(model.coefficients, shape.features, strict=True))
        assert found == pytest.approx(seconds(costs, shape), rel=0.2)


def test_no_cost_is_negative() -> None:
    sums = np.diag([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    sums[:2, 5] = 1.0, -1.0  # with seconds
    moments = Moments(sums=tuple(sums.flatten()))
    assert fit_costs(moments) == pytest.approx([1.0, 0.0, 0.0, 0.0, 0.0], rel=1e-3)
    assert fit_costs(Moments()) == (0.0,) * 5


def steps() -> StepMoments:
    recorder = StepRecorder()
    for i in range(40):
        tokens, reqs = 20 * (i % 7 + 1), i % 5 + 1
        for shape in (StepShape(tokens, 0.0, tokens), StepShape(decode_reqs=reqs)):
            took = STEP_S + TOKEN_S * shape.prefill_tokens + REQUEST_S * shape.decode_reqs
            recorder.observe(shape, took, 0.0)
    return recorder.moments(0.0)


def test_unknown_steps_are_not_predicted() -> None:
    model = fit_steps(steps(), NOTHING, chunk_tokens=50)
    assert model.prefill_s(prompt_work(100)) == pytest.approx(2 * STEP_S + 0.1, rel=0.02)
    assert model.prefill_s(prompt_work(100, cached=60)) == pytest.approx(STEP_S + 0.04, rel=0.02)
    beside = model.prefill_s(prompt_work(100), Batch(10, 0))
    assert beside == pytest.approx(2 * (STEP_S + 10 * REQUEST_S) + 0.1, rel=0.02)
    assert model.prefill_s(prompt_work(round(141 * MAX_EXTRAPOLATION))) is None
    assert fit_steps(NOTHING, NOTHING).prefill_s(prompt_work(10)) is None
    # Measurements of other workers of the model fill in.
    assert fit_steps(NOTHING, steps()).prefill_s(prompt_work(10)) is not None


def measure(member: Member) -> None:
    member.reported = structs.replace(member.reported, steps=steps())


class Rig:
    """Return a fleet of one prefill and one decode worker, with the test's clock."""

    def __init__(self, *, measured: bool = True, **slo: float) -> None:
        self.now = 1000.0
        self.fleet = Fleet(lease_s=1e9, clock=lambda: self.now)
        self.slo = SloConfig(**({"ttft_s": 0.5, "tpot_s": 0.05} | slo))
        self.costs = CostModel(self.fleet, self.slo, lambda: self.now)
        self.prefill, self.decode = self.add("p0", Role.PREFILL), self.add("d0", Role.DECODE)
        if measured:
            measure(self.prefill)
            measure(self.decode)
            for _ in range(int(MIN_SAMPLES)):
                self.answered()

    def add(self, worker_id: str, role: Role, group: str = "") -> Member:
        self.fleet.register(replace(worker_info(worker_id, role), group=group))
        member = self.fleet.members[worker_id]
        member.attached = True
        member.report_load(WorkerLoad(0, 0, 0.0, 100))
        return member

    def answered(self, *, tokens: int = 21, transport: str = "tcp", **changes: object) -> None:
        values: dict[str, object] = {
            "prefill_worker": "p0",
            "decode_worker": "d0",
            "transport": transport,
            "exposed_transfer_s": TRANSFER_S,
            "prefill_s": 0.1,
        }
        receipt = Receipt(**(values | changes))  # type: ignore[arg-type]
        self.costs.answered("demo", Usage(100, tokens, 0), receipt, ttft_s=0.15, e2e_s=0.45)

    def predict(self, tokens: int = 100, *, aggregated: bool = False, cached: int = 0) -> float:
        prefill = None if aggregated else self.prefill.snapshot()
        found = self.costs.predict(
            Demand("demo", tokens, tokens + 10),
            prefill,
            self.decode.snapshot(),
            {"p0": cached, "d0": cached},
        )
        assert found is not None
        return found.ttft_s

    def place(self, tokens: int, *, aggregated: bool = False) -> QueuedPrompt:
        placement = Placement(
            self.decode.snapshot(), None if aggregated else self.prefill.snapshot()
        )
        demand = Demand("demo", tokens, tokens + 10)
        _, prompt = self.costs.placed(Decision("", [], demand, 0, placement))
        return prompt

    def aggregates(self, tokens: int = 100) -> bool:
        demand, candidates = Demand("demo", tokens, tokens + 10), self.fleet.candidates("demo")
        decision = POLICIES["slo_aware"](candidates, demand, 0, PlacementContext(cost=self.costs))
        self.costs.placed(decision)
        assert decision.placement is not None
        return decision.placement.prefill is None


@pytest.mark.parametrize(
    ("share", "worth"),
    [
        pytest.param(0.0, 60, id="no load measured"),
        pytest.param(0.25, 45, id="loading takes a quarter of computing"),
        pytest.param(1.5, -20, id="loading is slower"),
    ],
)
def test_tokens_in_host_memory_count_as_what_loading_them_saves(share: float, worth: int) -> None:
    rig, demand = Rig(), Demand("demo", 100, 110)
    rig.prefill.report_load(WorkerLoad(0, 0, 0.0, 100, tier_token_s=share * TOKEN_S))
    found = rig.costs.tier_worth(demand, rig.prefill.snapshot(), 20, 60)
    assert found == pytest.approx(worth, abs=1)
    loads_s = STEP_S + 20 * TOKEN_S + 60 * min(share, 80 / 60) * TOKEN_S
    assert rig.predict(cached=20 + found) == pytest.approx(loads_s, rel=0.05)


def plan(rig: Rig, held: int = 80, cached: int = 0) -> PrefixFetch | None:
    """Return the copy of cached tokens from the decode worker to the prefill worker."""
    demand = Demand("demo", 120, 130, token_ids=tuple(range(120)))
    return rig.costs.fetch(demand, rig.prefill.snapshot(), rig.decode.snapshot(), cached, held)


def test_cached_kv_is_copied_if_that_is_faster_than_computing_it() -> None:
    rig = Rig()
    # One step at either end, of a token and of a request, and what is assumed of the copy.
    copy_s = 2 * STEP_S + TOKEN_S + REQUEST_S + FETCH_S + 80 * FETCH_TOKEN_S
    found = plan(rig)
    assert found is not None
    assert (found.holder, found.tokens, found.missing) == ("d0", 80, 80)
    assert found.copy_s == pytest.approx(copy_s, rel=0.05)
    assert found.compute_s == pytest.approx(80 * TOKEN_S, rel=0.05)
    assert found.worth == pytest.approx(80 - copy_s / TOKEN_S, abs=2)
    few, unknown = plan(rig, cached=64), plan(Rig(measured=False))
    assert few is not None
    assert (few.missing, few.worth, unknown) == (16, 0, None)
    rig.place(400, aggregated=True)
    waits = plan(rig)
    assert waits is not None
    assert waits.worth == 0, "the holder has a long prompt to compute before"


def test_slow_copies_are_not_made_again_until_they_are_old() -> None:
    rig = Rig()
    found = plan(rig)
    assert found is not None
    for _ in range(8):
        rig.costs.fetched("demo", "p0", found, 0.3)
    slow = plan(rig)
    assert slow is not None
    assert slow.copy_s > 0.2
    assert slow.worth == 0
    rig.now += RELEARN_S + 1.0
    assert plan(rig) == found


def test_short_copies_say_little_of_long_ones() -> None:
    rig = Rig()
    found = plan(rig)
    assert found is not None
    for _ in range(40):
        rig.costs.fetched("demo", "p0", found, found.copy_s + 0.020)
    line = rig.costs._line("demo", "")
    assert line.seconds(80) == pytest.approx(FETCH_S + 0.020, rel=0.1)
    assert line.seconds(FAR_TOKENS) < 2 * FAR_TOKENS * FETCH_TOKEN_S


def test_the_first_token_waits_for_the_prompt_and_for_the_prompts_ahead() -> None:
    rig = Rig()
    alone = STEP_S + 100 * TOKEN_S
    assert rig.predict() == pytest.approx(alone, rel=0.02)
    assert rig.predict(aggregated=True) == pytest.approx(alone, rel=0.02)
    assert rig.predict(cached=60) == pytest.approx(STEP_S + 40 * TOKEN_S, rel=0.02)
    prompt = rig.place(200)
    behind = STEP_S + 300 * TOKEN_S
    assert rig.predict() == pytest.approx(behind, rel=0.02)
    assert rig.predict(aggregated=True) == pytest.approx(alone, rel=0.02)
    # The part that is computed meanwhile is not waited for.
    rig.now += 0.1
    assert rig.predict() == pytest.approx(behind - 0.1, rel=0.02)
    rig.now += 60.0
    assert rig.predict() == pytest.approx(alone, rel=0.15)
    rig.costs.computed(prompt)
    rig.costs.computed(prompt)
    assert rig.predict() == pytest.approx(alone, rel=0.02)


def test_when_images_are_encoded_is_predicted() -> None:
    rig, demand = Rig(), Demand("demo", 100, 110)
    for _ in range(int(MIN_SAMPLES)):
        assert rig.costs.encode_s("demo", 200) is None
        rig.costs.encoded("demo", 100, 0.05)
    assert rig.costs.encode_s("demo", 200) == pytest.approx(0.1)
    assert rig.costs.prefill_wait_s(demand, rig.prefill.snapshot(), {}) == pytest.approx(0.0)
    rig.place(200)
    wait_s = rig.costs.prefill_wait_s(demand, rig.prefill.snapshot(), {})
    assert wait_s == pytest.approx(200 * TOKEN_S, rel=0.05)


def test_an_aggregated_prefill_delays_the_streams_beside_it() -> None:
    rig = Rig()
    rig.decode.report_load(WorkerLoad(0, 4, 0.1, 90))
    found = rig.costs.predict(Demand("demo", 100, 110), None, rig.decode.snapshot(), {})
    assert found is not None
    assert found.itl_s == pytest.approx(STEP_S + 4 * REQUEST_S, rel=0.05)
    assert found.itl_harm_s == pytest.approx(4 * 100 * TOKEN_S, rel=0.02)
    idle = Rig()
    alone = idle.costs.predict(Demand("demo", 100, 110), None, idle.decode.snapshot(), {})
    assert alone is not None
    assert alone.itl_harm_s == 0.0
    assert found.cost_s > alone.cost_s


def test_prefill_is_aggregated_only_if_that_is_cheaper_for_everybody() -> None:
    rig = Rig()
    assert not rig.aggregates(), "equal: disaggregated"
    for _ in range(5):
        rig.place(300)
    assert rig.aggregates(), "prompts wait on the prefill worker"
    rig.decode.report_load(WorkerLoad(0, 20, 0.5, 50))
    assert not rig.aggregates(), "20 streams would miss their TPOT"


def test_prompts_that_wait_on_a_decode_worker_delay_its_streams_too() -> None:
    rig = Rig()
    rig.decode.report_load(WorkerLoad(0, 4, 0.1, 90))

    def cost() -> float:
        found = rig.costs.predict(Demand("demo", 300, 310), None, rig.decode.snapshot(), {})
        assert found is not None
        return found.cost_s

    before = cost()
    prompts = [rig.place(300, aggregated=True) for _ in range(2)]
    assert cost() > before * 1.1
    for prompt in prompts:
        rig.costs.computed(prompt)
    assert cost() == pytest.approx(before)


def test_a_step_of_a_rank_is_as_long_as_the_longest_of_its_group() -> None:
    rig, demand = Rig(reject_factor=0.4), Demand("demo", 100, 110)
    idle, busy = (rig.add(f"g{i}", Role.DECODE, group="g0") for i in range(2))
    idle.placed.outstanding_requests = 1
    busy.report_load(WorkerLoad(0, 6, 0.1, 90))
    found = rig.costs.predict(demand, rig.prefill.snapshot(), idle.snapshot(), {})
    assert found is not None
    assert found.itl_s == pytest.approx(STEP_S + 6 * REQUEST_S, rel=0.05)
    # A prompt there delays the streams of all ranks.
    aggregated = rig.costs.predict(demand, None, idle.snapshot(), {})
    assert aggregated is not None
    assert aggregated.itl_harm_s == pytest.approx(6 * 100 * TOKEN_S, rel=0.02)
    assert rig.costs.has_capacity(demand, idle.snapshot())
    busy.report_load(WorkerLoad(0, 20, 0.1, 90))
    assert not rig.costs.has_capacity(demand, idle.snapshot())


def test_a_prompt_waits_for_those_of_the_other_ranks_of_its_group() -> None:
    rig = Rig()
    rig.prefill = rig.add("g0", Role.PREFILL, group="g0")
    other = rig.add("g1", Role.PREFILL, group="g0")
    alone = STEP_S + 100 * TOKEN_S
    assert rig.predict() == pytest.approx(alone, rel=0.02)
    first, rig.prefill = rig.prefill, other
    rig.place(300)
    rig.prefill = first
    assert rig.predict() == pytest.approx(STEP_S + 300 * TOKEN_S, rel=0.02), "one step of both"
    rig.place(300)
    assert rig.predict() == pytest.approx(STEP_S + 400 * TOKEN_S, rel=0.02), "side by side"


def test_without_measurements_nothing_is_predicted() -> None:
    rig = Rig(measured=False)
    demand = Demand("demo", 100, 110)
    assert rig.costs.predict(demand, rig.prefill.snapshot(), rig.decode.snapshot(), {}) is None
    assert rig.costs.predict(demand, None, rig.decode.snapshot(), {}) is None
    assert rig.costs.estimate("demo", 100, 10) is None
    assert rig.costs.means("demo") is None
    assert not rig.aggregates()
    # New measurements count after a while.
    measure(rig.decode)
    rig.now += REFIT_S
    assert rig.costs.predict(demand, None, rig.decode.snapshot(), {}) is not None


def test_the_steps_of_two_self_tests_predict_the_first_request_and_its_next_turn() -> None:
    rig = Rig(measured=False)
    for worker in (rig.prefill, rig.decode):
        recorder = StepRecorder()
        for length in (16, 32, 64, 128, 256):
            for shape in (
                StepShape(length, length**2 / 2, length),
                *[StepShape(0, 0, 0, 1, 1)] * 2,
            ):
                took_s = STEP_S + TOKEN_S * shape.prefill_tokens + REQUEST_S * shape.decode_reqs
                recorder.observe(shape, took_s, rig.now)
        moments = recorder.moments(rig.now)
        worker.reported = structs.replace(worker.reported, steps=moments)
    assert rig.predict(1000) == pytest.approx(1.0 + STEP_S, rel=0.1)
    assert not rig.aggregates()

    def cost_s(prefill: Member | None) -> float:
        cached, seen = {"p0": 400, "d0": 900}, prefill and prefill.snapshot()
        found = rig.costs.predict(Demand("demo", 1000, 1010), seen, rig.decode.snapshot(), cached)
        assert found is not None
        return found.cost_s

    assert is_clearly_cheaper(cost_s(None), cost_s(rig.prefill))


def test_the_transfer_time_of_a_pair_is_its_own_or_that_of_the_model() -> None:
    rig = Rig()
    other = rig.add("d1", Role.DECODE)
    measure(other)
    demand = Demand("demo", 100, 110)

    def transfer_s(decode: Member) -> float:
        found = rig.costs.predict(demand, rig.prefill.snapshot(), decode.snapshot(), {})
        assert found is not None
        return found.transfer_s

    assert transfer_s(rig.decode) == transfer_s(other) == pytest.approx(TRANSFER_S)
    for _ in range(20):
        rig.answered(decode_worker="d1", exposed_transfer_s=0.5)
    assert transfer_s(rig.decode) == pytest.approx(TRANSFER_S)
    assert transfer_s(other) > 0.1


def test_a_decode_worker_takes_requests_until_its_tpot_would_exceed_the_limit() -> None:
    demand = Demand("demo", 100, 110)
    for factor, most in ((0.0, 40), (1.0, 40), (0.4, 10), (0.1, 1)):
        rig, taken = Rig(tpot_s=0.05, reject_factor=factor), 0
        while taken < 40 and rig.costs.has_capacity(demand, rig.decode.snapshot()):
            taken += 1
            rig.decode.placed.outstanding_requests = taken
            rig.decode.report_load(WorkerLoad(0, taken, 0.1, 90))
        # Half of a request's time it decodes: 10 ms + 1 ms for each request that does.
        assert taken == pytest.approx(most, rel=0.5)


def test_estimates_for_admission_come_from_answered_requests() -> None:
    rig = Rig()
    found = rig.costs.estimate("demo", 200, 11)
    assert found is not None
    assert found.wait_s == pytest.approx(0.05)
    assert found.prefill_s == pytest.approx(STEP_S + 0.2, rel=0.02)
    assert found.decode_s == pytest.approx((0.45 - 0.15 - TRANSFER_S) * 11 / 20, rel=0.02)


@pytest.mark.parametrize(
    ("interval_s", "told"),
    [
        (60.0, "about equal: predicted means TTFT 0.1"),
        (0.2, "yes: predicted means TTFT 0.1"),
        (0.05, "overload: predicted means overload; aggregated overload. This load is too much"),
    ],
)
def test_whether_disaggregation_helps_is_predicted_for_the_load(
    interval_s: float, told: str
) -> None:
    rig = Rig(tpot_s=0.0145)
    for model in ("demo", "other"):
        assert rig.costs.disaggregation(model) == "not enough data"
    for _ in range(100):
        rig.now += interval_s
        rig.answered()
    assert rig.costs.disaggregation("demo").startswith(told)


@pytest.mark.parametrize(
    ("split", "aggregated", "verdict"),
    [
        ((0.338, 0.1601), (0.348, 0.1592), "about equal"),
        ((1.47, 0.023), (1.42, 0.024), "about equal"),
        ((1.05, 0.05), (1.0, 0.05), "about equal"),  # where the cost is steepest
        ((0.5, 0.05), (0.5, 0.08), "yes"),
        ((0.5, 0.05), (0.3, 0.05), "no"),
        ((0.5, 0.05), (math.inf, math.inf), "yes"),
    ],
)
def test_small_differences_are_no_reason_for_or_against_disaggregation(
    split: tuple[float, float], aggregated: tuple[float, float], verdict: str
) -> None:
    costs = Rig(tpot_s=0.1).costs
    assert costs.verdict(Latency(*split), Latency(*aggregated)) == verdict
    if verdict == "about equal":
        assert costs.verdict(Latency(*aggregated), Latency(*split)) == verdict


@pytest.mark.parametrize(("reported", "steps_of_100"), [(50, 2), (0, 1)])
def test_the_limit_of_a_worker_sets_the_number_of_steps_of_a_prompt(
    reported: int, steps_of_100: int
) -> None:
    rig = Rig()
    rig.prefill.info = replace(rig.prefill.info, limits=EngineLimits(8, reported))
    model = rig.costs.step_model("p0")
    assert model is not None
    assert model.prefill_s(prompt_work(100)) == pytest.approx(steps_of_100 * STEP_S + 0.1, rel=0.02)


def test_the_ttft_and_price_of_a_model_follow_its_load() -> None:
    rig = Rig()
    for member in (rig.prefill, rig.decode):
        member.info = replace(member.info, device="cpu", devices=1)
    billing = Billing({"cpu": 3600.0}, lambda *_, **__: None)  # a second costs 1
    admission = AdmissionController(QueueConfig(), clock=lambda: rig.now)
    forecast = Forecast(rig.fleet, rig.costs, admission, billing, RegionPeers(""))

    def facts(prompt_tokens: int = 100, max_tokens: int = 10) -> ModelFacts:
        model = rig.prefill.info.model
        return forecast.of(model, prompt_tokens, max_tokens, None, has_images=False, starts=False)

    idle = facts()
    assert idle.ttft_s == pytest.approx(STEP_S + 100 * TOKEN_S, rel=0.02)
    steps_s = STEP_S + 100 * TOKEN_S + 10 * (STEP_S + REQUEST_S)
    assert idle.cost == pytest.approx(steps_s, rel=0.05)
    # Nine others share the decode steps, and another prompt is computed first.
    rig.decode.report_load(WorkerLoad(0, 9, 0.1, 90))
    rig.place(100)
    loaded = facts()
    assert loaded.ttft_s == pytest.approx(STEP_S + 200 * TOKEN_S, rel=0.05)
    shared_s = STEP_S + 100 * TOKEN_S + 10 * (STEP_S + 10 * REQUEST_S) / 10
    assert loaded.cost == pytest.approx(shared_s, rel=0.1)
    assert facts(prompt_tokens=5000).cannot == "its context is 4096 tokens"
    assert (idle.cannot, idle.busy) == ("", "")
    rig.decode.attached = rig.prefill.attached = False
    assert "no prefill worker" in facts().busy
    assert (facts().ttft_s, facts().cost) == (None, None)
