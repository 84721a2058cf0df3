"""Plans: the arithmetic by hand, and that what is found keeps its promise and nothing less does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.errors import BenchError
from benchmarks.simulation.capacity import Lengths, saturation
from benchmarks.simulation.plan import Question, Search, first_guess, plan
from benchmarks.simulation.run import Setup, simulate_users
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.service_model import EngineModel, ServiceModel
from benchmarks.simulation.users import Users, pairs_around
from pdserve.config import RouterConfig, SloConfig
from pdserve.types import Role
from router.cost.step_model import StepModel

# A step takes 10 ms, 0.1 ms for each prompt token and 1 ms for each request that decodes.
STEPS = StepModel((0.01, 0.1, 0.0, 0.01, 0.0), 100.0, 100.0, 2048, 0.0)
ENGINE = EngineModel(STEPS, 16, 4096, 64)
# A policy that never prefills where it decodes, so that a prefill worker is needed for its rate.
SETTINGS = RouterSettings(
    RouterConfig(policy="least_loaded", slo=SloConfig(ttft_s=1.0, tpot_s=0.03))
)


def question(**more: float) -> Question:
    model = ServiceModel(dict.fromkeys(Role, ENGINE), transfer_base_s=0.002)
    asked = Question(model=model, settings=SETTINGS, lengths=Lengths([(400, 51)]))
    return replace(asked, **more)


def test_what_one_worker_can_do_at_most() -> None:
    found = saturation(ENGINE, ENGINE, Lengths([(400, 51)]), 0.03)
    # A prompt takes 50 ms; 20 requests decode in steps of 30 ms, 50 tokens each.
    assert found.prefill_per_s == pytest.approx(20)
    assert (found.batch, found.step_s) == (20, pytest.approx(0.03))
    assert found.decode_per_s == pytest.approx(20 / (50 * 0.03))
    assert found.aggregated_per_s == pytest.approx(1 / (0.075 + 0.04))
    # Seats and blocks bound the batch too.
    tight = saturation(ENGINE, replace(ENGINE, max_num_seqs=5), Lengths([(400, 51)]), 0.03)
    small = saturation(ENGINE, replace(ENGINE, total_blocks=60), Lengths([(400, 51)]), 0.03)
    assert (tight.batch, small.batch) == (5, 2)


def test_a_plan_keeps_the_limits_and_a_worker_less_does_not() -> None:
    asked = question(rate_per_s=30.0)
    apart, together, _ = first_guess(asked)
    assert apart == Workers(2, 3)
    answer = plan(asked, apart, lambda _: None)
    assert answer.summary.attainment >= 0.99
    assert answer.cost_per_hour == answer.workers.prefill + answer.workers.decode
    assert answer.per_million_output > answer.per_million
    search = Search(asked, lambda _: None)
    assert search.meets(answer.workers)
    assert not search.meets(Workers(answer.workers.prefill - 1, answer.workers.decode))
    assert not search.meets(Workers(answer.workers.prefill, answer.workers.decode - 1))
    assert together.aggregated == 5


def test_users_wait_for_their_answers() -> None:
    users = Users(30, 0.0, 4.0, 8.0, ((400, 51),))
    setup = Setup(question().model, Workers(2, 2), SETTINGS)
    found = simulate_users(setup, users)
    summary = found.summary
    assert summary.e2e is not None
    assert found.leftovers == ()
    # Little: as many are in the service as there are users who do not think.
    assert summary.rate_per_s * summary.e2e.mean == pytest.approx(30, rel=0.1)


def test_lengths_are_around_their_means() -> None:
    lengths = Lengths(pairs_around(500, 200, 4000, 1))
    assert (lengths.prompt, lengths.output) == (
        pytest.approx(500, rel=0.05),
        pytest.approx(200, rel=0.05),
    )
    assert pairs_around(500, 200, 9, 1) == pairs_around(500, 200, 9, 1)


def test_what_no_number_of_workers_can_keep_is_refused() -> None:
    for slo, reason in (
        (SloConfig(ttft_s=0.02, tpot_s=0.03), "first token in 0.02 s"),
        (SloConfig(ttft_s=1.0, tpot_s=0.005), "later than 0.005 s"),
    ):
        hopeless = question(rate_per_s=2.0, settings=RouterSettings(RouterConfig(slo=slo)))
        with pytest.raises(BenchError, match=reason):
            plan(hopeless, Workers(1, 1), lambda _: None)
