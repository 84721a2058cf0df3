"""Modelled workers that change their role by the router's own controller, and clients who come
again: what must hold of any such run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.simulation.arrivals import Arrival, Arrivals
from benchmarks.simulation.run import Finished, Setup, simulate
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.service_model import EngineModel, ServiceModel
from pdserve.config import RouterConfig, SloConfig
from pdserve.errors import Refusal
from pdserve.role_config import RolesConfig
from pdserve.types import Role
from router.cost.step_model import StepModel

# A step takes 10 ms, 0.1 ms for each prompt token, 1 ms for each request that decodes and 10 µs for
# each token of their context.
STEPS = StepModel((0.01, 0.1, 0.0, 0.01, 0.1), 100.0, 100.0, 2048, 0.0)
ROLES = RolesConfig(auto=True, window_s=10.0, dwell_s=10.0, settle_s=20.0)
FLIP_S = 0.7
# Of two workers each: prompts take 2.5 workers, then answers do.
PROMPTS, ANSWERS = (12.0, 2000, 4), (4.0, 50, 200)
PART_S = 90.0


def service(
    roles: RolesConfig, policy: str, *, blocks: int = 4000, context_s: float = 0.1
) -> Setup:
    steps = replace(STEPS, coefficients=(*STEPS.coefficients[:4], context_s))
    model = ServiceModel(
        dict.fromkeys(Role, EngineModel(steps, 16, blocks, 64)),
        transfer_base_s=0.005,
        overhead_s=0.001,
    )
    config = RouterConfig(policy=policy, roles=roles, slo=SloConfig(refuse_beyond=1.0))
    return Setup(model, Workers(2, 2), RouterSettings(config, flip_s=FLIP_S))


def shifting(seed: int, *parts: tuple[float, int, int]) -> Arrivals:
    draw, found = random.Random(seed), list[Arrival]()
    for number, (rate, prompt, output) in enumerate(parts):
        at_s = number * PART_S
        while (at_s := at_s + draw.expovariate(rate)) < (number + 1) * PART_S:
            found.append(Arrival(at_s, prompt, output))
    return Arrivals(tuple(found), 0, ())


def check(found: Finished) -> None:
    """Nobody is lost, and nothing left; none was refused but for its first token's lateness."""
    assert found.leftovers == ()
    refused = found.summary.refused
    assert set(refused) <= {Refusal.SLO_UNREACHABLE}
    assert found.summary.answered + sum(refused.values()) == found.summary.requests


@pytest.mark.parametrize("policy", ["least_loaded", "slo_aware"])
def test_the_split_follows_a_shift_of_the_load_and_does_not_flap(policy: str) -> None:
    arrivals = shifting(1, PROMPTS, ANSWERS)
    found = simulate(service(ROLES, policy), arrivals)
    check(found)
    flips = found.summary.flips
    roles = [flip.role for flip in flips]
    assert roles == ["prefill", "decode", "decode"]
    # The second way is gone after the load has shifted, not before.
    assert flips[0].at_s < PART_S < flips[1].at_s
    for before, after in pairwise(flips):
        assert after.at_s - (before.at_s + before.total_s) >= ROLES.settle_s
    assert all(flip.total_s == pytest.approx(flip.drain_s + FLIP_S) for flip in flips)
    assert found.summary.pools["decode"].workers == len(roles)
    assert simulate(service(ROLES, policy), arrivals) == found
    fixed = simulate(service(RolesConfig(), policy), arrivals)
    assert fixed.summary.flips == ()
    assert found.summary.attainment > fixed.summary.attainment


def test_under_a_load_that_fits_nothing_is_moved() -> None:
    even = (9.0, 1000, 8)
    for seed in range(2):
        found = simulate(service(ROLES, "least_loaded"), shifting(seed, even, even))
        check(found)
        assert found.summary.flips == ()


def test_answers_that_outlast_a_drain_go_on_elsewhere() -> None:
    roles = RolesConfig(auto=True, window_s=1.0, dwell_s=1.0, settle_s=1.0, drain_timeout_s=0.05)
    setup = service(roles, "least_loaded", context_s=0.01)
    found = simulate(setup, shifting(2, (12.0, 2000, 24), (0.2, 50, 24)))
    check(found)
    moved = [x for x in found.outcomes if x.moves]
    assert len(moved) == found.summary.moved > 0
    assert sum(flip.moved for flip in found.summary.flips) == sum(x.moves for x in moved)
    assert all(flip.drain_s < 1.0 for flip in found.summary.flips)
    # All have all of their tokens, and what was there already is computed again.
    assert all(x.last_s - x.first_s >= 22 * 0.011 + 0.2 for x in moved)


def test_who_is_refused_and_comes_again_when_told_is_taken() -> None:
    config = RouterConfig(policy="slo_aware", max_queued_requests=8)
    setup = service(RolesConfig(), "slo_aware", blocks=400)
    overload = shifting(5, (14.0, 600, 60))
    settings = RouterSettings(config)
    once = simulate(Setup(setup.model, setup.workers, settings), overload)
    assert once.summary.refused
    again = simulate(Setup(setup.model, setup.workers, settings, retries=3), overload)
    assert again.leftovers == ()
    assert again.summary.came_again > 100
    assert again.summary.refused_again <= 0.1 * again.summary.came_again
    assert again.summary.answered > once.summary.answered
    assert {x.tries for x in again.outcomes} > {1, 2}
