"""The simulator: against arithmetic, against an engine that makes one step at a time, and for what
must hold of any run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchError
from benchmarks.simulation.arrivals import Arrival, Arrivals, Load, arrivals_of
from benchmarks.simulation.caches import PrefixCaches
from benchmarks.simulation.gaps import Gaps
from benchmarks.simulation.policies import compare
from benchmarks.simulation.run import Setup, simulate
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.service_model import EngineModel, ServiceModel
from pdserve.config import RouterConfig
from pdserve.types import Role
from router.cost.step_model import StepModel
from router.placement.values import Demand

if TYPE_CHECKING:
    from collections.abc import Sequence

# A step takes 10 ms, 0.1 ms for each prompt token, 1 ms for each request that decodes and 10 µs for
# each token of their context.
STEPS = StepModel((0.01, 0.1, 0.0, 0.01, 0.1), 100.0, 100.0, 2048, 0.0)


def model(*, chunk: int = 0, blocks: int = 1000, seats: int = 64) -> ServiceModel:
    engine = EngineModel(replace(STEPS, chunk_tokens=chunk), 16, blocks, seats)
    return ServiceModel(dict.fromkeys(Role, engine), transfer_base_s=0.005, overhead_s=0.001)


def settings(policy: str = "round_robin", **more: float) -> RouterSettings:
    return RouterSettings(RouterConfig(policy=policy, **{"prefill_chunks_ahead": 0, **more}))


def requests(*rows: tuple[float, int, int]) -> Arrivals:
    return Arrivals(tuple(Arrival(*row) for row in rows), 0, ())


def test_one_request_through_both_phases() -> None:
    found = simulate(Setup(model(), Workers(1, 1), settings()), requests((0.0, 100, 3)))
    (outcome,) = found.outcomes
    assert outcome.first_s == pytest.approx(0.001 + 0.01 + 100 * 0.0001)
    # KV comes after 5 ms; then two steps with 101 and 102 tokens of context.
    last_s = outcome.first_s + 0.005 + (0.011 + 101e-5) + (0.011 + 102e-5)
    assert outcome.last_s == pytest.approx(last_s)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("prefill-0", "decode-0")
    assert found.leftovers == ()


def test_prompts_are_cut_into_chunks_and_share_steps() -> None:
    arrivals = requests((0.0, 100, 2), (0.001, 50, 1))
    found = simulate(Setup(model(chunk=64), Workers(aggregated=1), settings()), arrivals)
    first, second = found.outcomes
    # 64 tokens, then 36 and 28 of the second; then 22 beside the first one's second token.
    assert first.first_s == pytest.approx(0.001 + 2 * (0.01 + 0.0064))
    third_s = 0.01 + 0.0022 + 0.001 + 101e-5
    assert first.last_s == pytest.approx(first.first_s + third_s)
    assert second.first_s == second.last_s == pytest.approx(first.last_s)


def test_who_comes_while_others_decode_joins_the_next_step() -> None:
    arrivals = requests((0.0, 10, 4), (0.030, 10, 1))
    found = simulate(Setup(model(), Workers(aggregated=1), settings()), arrivals)
    first, second = found.outcomes
    began = 0.001 + 0.011
    steps = [0.011 + context * 1e-5 for context in (11, 12, 13)]
    # It is in the engine's queue at 31 ms, while the second step is made, and is computed in the
    # third, beside the last token of the first.
    joined = began + steps[0] + steps[1]
    assert joined - steps[1] < 0.031 < joined
    assert second.first_s == pytest.approx(joined + steps[2] + 10 * 0.0001)
    assert first.last_s == pytest.approx(second.first_s)


def test_requests_wait_for_blocks_and_seats() -> None:
    # Blocks for one: the second is granted when the first has ended.
    arrivals = requests((0.0, 64, 32), (0.0, 64, 32))
    one = Setup(model(blocks=8), Workers(aggregated=1), settings())
    first, second = simulate(one, arrivals).outcomes
    assert second.admission_s == pytest.approx(first.last_s)
    # A seat for one: the router's gate keeps the second.
    one = Setup(model(seats=1), Workers(aggregated=1), settings())
    first, second = simulate(one, arrivals).outcomes
    assert second.admission_s == pytest.approx(first.last_s)


def one_by_one(arrivals: Arrivals) -> tuple[list[tuple[float, float]], list[float]]:
    """First and last token of each request on one aggregated engine without chunks, and all gaps,
    by making every step."""
    waiting = [(at_s + 0.001, i) for i, at_s in enumerate(a.at_s for a in arrivals.requests)]
    running: dict[int, tuple[int, float]] = {}
    times: dict[int, tuple[float, float]] = {}
    gaps: list[float] = []
    now = 0.0
    while waiting or running:
        if not running and waiting[0][0] > now:
            now = waiting[0][0]
        coming = [i for at_s, i in waiting if at_s <= now]
        waiting = waiting[len(coming) :]
        rows = arrivals.requests
        contexts = sum(rows[i].prompt_tokens + done for i, (done, _) in running.items())
        prompts = sum(rows[i].prompt_tokens for i in coming)
        now += 0.01 + prompts * 0.0001 + len(running) * 0.001 + contexts * 1e-5
        for i, (done, at_s) in list(running.items()):
            gaps.append(now - at_s)
            running[i] = (done + 1, now)
        running |= dict.fromkeys(coming, (1, now))
        for i, (done, _) in list(running.items()):
            times[i] = (times.get(i, (now, now))[0], now)
            if done == rows[i].output_tokens:
                del running[i]
    return [times[i] for i in range(len(times))], gaps


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_strides_are_as_exact_as_single_steps(seed: int) -> None:
    draw = random.Random(seed)
    at_s, rows = 0.0, list[tuple[float, int, int]]()
    for _ in range(150):
        at_s += draw.expovariate(4.0)
        rows.append((at_s, draw.randint(1, 200), draw.randint(1, 60)))
    arrivals = requests(*rows)
    found = simulate(Setup(model(blocks=10**6), Workers(aggregated=1), settings()), arrivals)
    times, gaps = one_by_one(arrivals)
    assert [x.first_s for x in found.outcomes] == pytest.approx([first for first, _ in times])
    assert [x.last_s for x in found.outcomes] == pytest.approx([last for _, last in times])
    itl = found.summary.itl
    assert itl is not None
    ordered = sorted(gaps)
    for name, value in itl.items():
        rank = -(-len(ordered) * int(name[1:]) // 100) - 1
        assert value == pytest.approx(ordered[rank], rel=0.0051)


def test_gaps_that_grow_are_counted_where_they_belong() -> None:
    gaps, plain = Gaps(), Gaps()
    gaps.add_growing(0.01, 0.0001, 300, 3)
    for step in range(300):
        plain.add(0.01 + step * 0.0001, 3)
    assert gaps.count == plain.count == 900
    for percent in (1, 50, 90, 99):
        assert gaps.percentile(percent) == pytest.approx(plain.percentile(percent), rel=0.011)


def overload() -> tuple[Setup, Arrivals]:
    more = {"max_queued_requests": 16, "request_timeout_s": 12.0}
    setup = Setup(model(blocks=300, seats=8), Workers(2, 2, 1), settings("slo_aware", **more))
    load = Load(traces=("chat",), rate_per_s=60.0, duration_s=20.0)
    arrivals = arrivals_of(load)
    kept = [x for x in arrivals.requests if x.prompt_tokens + x.output_tokens < 4000]
    return setup, Arrivals(tuple(kept), 0, ())


def test_every_request_ends_once_and_nothing_is_left() -> None:
    setup, arrivals = overload()
    found = simulate(setup, arrivals)
    assert len(found.outcomes) == len(arrivals.requests)
    summary = found.summary
    assert summary.answered + sum(summary.refused.values()) == summary.requests
    assert {"slo_unreachable", "deadline_exceeded"} <= set(summary.refused)
    assert summary.answered > 50
    assert found.leftovers == ()


def test_cancelled_requests_leave_their_engines() -> None:
    late = settings("least_loaded", request_timeout_s=0.05)
    rows = [(i * 0.004, 50 + i, 40) for i in range(30)]
    found = simulate(Setup(model(), Workers(1, 1), late), requests(*rows))
    assert found.summary.refused == {"deadline_exceeded": 30}
    assert found.leftovers == ()


def test_a_thousand_workers() -> None:
    draw = random.Random(4)
    rows = [(i * 0.005, draw.randint(1, 1500), draw.randint(1, 300)) for i in range(200)]
    setup = Setup(model(), Workers(500, 400, 100), settings("slo_aware"))
    found = simulate(setup, requests(*rows))
    assert found.summary.answered == 200
    assert found.leftovers == ()


def run_command(hash_seed: str, *options: str) -> bytes:
    command = [sys.executable, "-m", "pdserve", "simulate", "--json", *options]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout


def test_the_same_options_give_the_same_bytes() -> None:
    options = ("--prefill", "2", "--decode", "2", "--trace", "longchat", "--rate", "3")
    options = (*options, "--scale-lengths", "1/16", "--duration", "20", "--arrivals", "poisson")
    first = run_command("1", *options)
    assert first == run_command("2", *options)
    assert first != run_command("1", *options, "--seed", "9")


def test_policies_are_given_the_same_requests() -> None:
    arrivals = requests(*((i * 0.05, 200, 20) for i in range(40)))
    setup = Setup(model(), Workers(2, 2), settings())
    policies = ("always_local", "round_robin")
    (compared,) = compare(setup, policies, [("even", arrivals)], lambda _: None)
    local, apart = compared.summaries
    assert (local.policy, apart.policy) == policies
    assert (local.requests, apart.requests) == (40, 40)
    assert (local.local_share, apart.local_share) == (1.0, 0.0)


def test_workers_that_cannot_serve_are_refused() -> None:
    with pytest.raises(BenchError, match="serve together"):
        Setup(model(), Workers(prefill=2))
    with pytest.raises(BenchError, match="aggregated"):
        Setup(model(), Workers())


def lengths(caches: PrefixCaches, prefix: Sequence[int]) -> dict[str, int]:
    demand = Demand("simulated", 100, 200, request_id="r")
    caches.prefixes["r"] = prefix
    return dict(caches.cached_tokens(demand))


def test_caches_know_the_longest_shared_beginning_and_forget_the_oldest() -> None:
    caches = PrefixCaches(10, {"a": 50, "b": 50, "c": 50})
    caches.store("a", (1, 2, 3))
    caches.store("b", (1, 2))
    caches.store("c", (7,))
    assert lengths(caches, (1, 2, 3, 4)) == {"a": 30, "b": 20}
    assert lengths(caches, (1, 9)) == {"a": 10, "b": 10}
    assert lengths(caches, (8,)) == {}
    assert caches.hit("a", (1, 2, 9), 25) == 20
    # The last token is computed in any case.
    assert caches.hit("a", (1, 2, 3), 30) == 29
    caches.store("a", (11, 12, 13))
    assert lengths(caches, (1, 2, 3)) == {"a": 20, "b": 20}
