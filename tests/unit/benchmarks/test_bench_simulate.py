"""The simulator: the real router and fake engines in virtual time, and plans made with it."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.progress import Progress
from benchmarks.simulate import Costs, Planner, Setup, VirtualLoop, drawn_trace, simulate
from benchmarks.traces import Trace, TraceMeta, TraceRequest, load_trace
from benchmarks.workload import Shape
from pdserve.config import load_config
from workers.fake.lockstep import FakeLockstep

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.replay import ReplayResult

COSTS = Costs(step_s=0.01, prefill_s=0.0001, decode_s=0.0, transfer_s=0.005)
SHORT = Shape(scale_lengths=Fraction(1, 32))


def simulated(**changes: Any) -> ReplayResult:
    values: dict[str, Any] = {"costs": COSTS, "requests": 20, "slo_s": {"ttft": 1.0, "tpot": 0.1}}
    values |= {"prefill": 1, "decode": 1} | changes
    config = load_config(None, {"router.policy": "least_loaded"}).router
    return simulate(Setup(**values), config, load_trace("chat"), SHORT, Progress())


def test_latencies_are_those_of_the_costs() -> None:
    result = simulated(rate_per_s=0.1)
    assert [r.status for r in result.records] == ["ok"] * 20
    for record in result.records:
        assert record.sent_s is not None
        expected_s = COSTS.step_s + COSTS.prefill_s * record.input_tokens
        assert record.chunk_s[0] - record.sent_s == pytest.approx(expected_s, abs=1e-4)
        if len(record.chunk_s) > 2:
            hand_off_s = record.chunk_s[1] - record.chunk_s[0]
            assert hand_off_s == pytest.approx(COSTS.step_s + COSTS.transfer_s, abs=1e-4)
            assert record.chunk_s[2] - record.chunk_s[1] == pytest.approx(COSTS.step_s, abs=1e-4)
    summary = result.summary()
    assert summary.receipts is not None
    assert summary.receipts.transferred > 0
    assert summary.slo is not None
    assert summary.slo.attainment == 1.0


def test_the_same_setup_gives_the_same_result() -> None:
    one, other = simulated(rate_per_s=50.0), simulated(rate_per_s=50.0)
    assert one.records == other.records


def test_aggregated_workers_move_no_kv() -> None:
    result = simulated(prefill=0, decode=0, aggregated=2, rate_per_s=5.0)
    summary = result.summary()
    assert summary.ok == 20
    assert summary.receipts is not None
    assert summary.receipts.transferred == 0
    assert len(summary.receipts.counts["decode_worker"]) == 2
    assert result.to_json()["target"]["name"] == "2A"


def test_a_router_uses_its_region_and_spills_over_under_load() -> None:
    found = []
    trace = drawn_trace(40, 10, requests=80, seed=1)
    for rate_per_s in (0.5, 400.0):
        config = load_config(None, {"router.policy": "slo_aware"}).router
        setup = Setup(
            prefill=2,
            decode=2,
            regions=2,
            costs=COSTS,
            requests=80,
            rate_per_s=rate_per_s,
            max_num_seqs=8,
            slo_s={"ttft": 1.0, "tpot": 0.1},
        )
        result = simulate(setup, config, trace, Shape(), Progress())
        assert result.summary().ok == 80
        found.append([result.target[name] for name in ("decoded_away", "kv_between_regions")])
    (idle_away, idle_crossed), (busy_away, busy_crossed) = found
    assert (idle_away, idle_crossed) == (0.0, 0.0)
    assert 0.2 < busy_away < 0.6  # half of the workers are there
    assert busy_crossed < 0.25  # at random, half of the pairs


def test_turns_of_agents_find_their_prompts_in_the_cache() -> None:
    config = load_config(None, {"router.policy": "prefix_aware"}).router
    setup = Setup(aggregated=2, costs=COSTS, requests=30, rate_per_s=0.5, slo_s={})
    shape = Shape(scale_lengths=Fraction(1, 64), max_turns=6)
    result = simulate(setup, config, load_trace("agent"), shape, Progress())
    assert [r.status for r in result.records] == ["ok"] * 30
    found = result.summary().sessions
    assert found is not None
    assert found.recomputed_tokens is not None
    # Only the last blocks, which answers leave incomplete.
    assert found.recomputed_tokens < 16 * 30
    assert found.hit_rate is not None
    assert found.hit_rate > 0.7


def test_ranks_of_a_group_step_together_as_long_as_the_longest() -> None:
    lockstep = FakeLockstep()

    async def rank(start_s: float, *steps_s: float) -> list[float]:
        now, ends = asyncio.get_running_loop().time, list[float]()
        await asyncio.sleep(start_s)
        for step_s in steps_s:
            await lockstep.between_rounds()
            assert await lockstep.step(step_s) >= step_s
            ends.append(round(now(), 3))
        return ends

    async def ranks() -> list[list[float]]:
        return await asyncio.gather(rank(0.0, 1.0, 4.0, 1.0), rank(0.0, 3.0), rank(2.0, 2.0))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(ranks()) == [[3.0, 7.0, 8.0], [3.0], [7.0]]


def test_a_group_is_as_many_workers_and_slower_than_they_would_be_apart() -> None:
    found = []
    for ranks in ({"prefill": 4, "decode": 4}, {"prefill_ranks": 4, "decode_ranks": 4}):
        result = simulated(rate_per_s=20.0, requests=80, **ranks)
        summary = result.summary()
        assert summary.ok == 80
        assert summary.receipts is not None
        for role in ("prefill", "decode"):
            names = {f"{role}-{i}" for i in range(4)}
            assert set(summary.receipts.counts[f"{role}_worker"]) == names
        assert summary.latency["ttft"] is not None
        found.append((result.to_json()["target"]["name"], summary.latency["ttft"].mean))
    (apart, apart_s), (group, group_s) = found
    assert (apart, group) == ("4P4D", "1x4P1x4D")
    assert group_s > apart_s


def test_lengths_can_be_drawn_instead_of_read() -> None:
    trace = drawn_trace(500, 200, requests=2000, seed=1)
    assert trace == drawn_trace(500, 200, requests=2000, seed=1)
    lengths = [row.input_tokens for row in trace.requests]
    assert sum(lengths) / 2000 == pytest.approx(500, rel=0.05)


def test_costs_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"step_s": 0.5}')
    assert Costs.read(path).step_s == 0.5
    path.write_text('{"nonsense": 1}')
    with pytest.raises(BenchError, match="holds no step costs"):
        Costs.read(path)


def planner(**changes: Any) -> Planner:
    values: dict[str, Any] = {
        "costs": COSTS,
        "requests": 15,
        "rate_per_s": 40.0,
        "max_num_seqs": 8,
        "slo_s": {"ttft": 0.5, "tpot": 0.1},
    }
    config = load_config(None, {"router.policy": "least_loaded"}).router
    setup = Setup(**(values | changes))
    return Planner(setup, config, load_trace("chat"), SHORT, 0.9, 2.0, Progress())


def test_a_plan_keeps_the_limits_with_few_workers() -> None:
    apart, whole = planner().plans()
    assert apart.aggregated == 0
    assert (whole.prefill, whole.decode) == (0, 0)
    for plan in (apart, whole):
        assert plan.attainment >= 0.9
        assert 1 <= plan.workers <= 12
        assert plan.cost_per_million is not None
        assert plan.cost_per_million > 0
    assert whole.row()[0] == "aggregated"


def test_a_plan_of_groups_has_whole_groups() -> None:
    ranks = {"prefill_ranks": 2, "decode_ranks": 4, "aggregated_ranks": 4}
    apart, whole = planner(**ranks).plans()
    assert apart.workers == 2 * apart.prefill + 4 * apart.decode
    assert whole.workers == 4 * whole.aggregated
    assert apart.row()[0] == f"{apart.prefill}x2 prefill, {apart.decode}x4 decode"
    assert whole.row()[0] == f"{whole.aggregated}x4 aggregated"


def test_limits_that_a_request_alone_misses_are_refused() -> None:
    with pytest.raises(BenchError, match="no number helps"):
        planner(slo_s={"ttft": 0.001}).plans()


def tide() -> Trace:
    """Two requests a second, then nine from 20 s to 50 s, then one in five seconds."""
    at_s = [x / 2 for x in range(40)] + [20 + x / 9 for x in range(270)]
    at_s += [50.0 + 5 * x for x in range(80)]
    rows = tuple(TraceRequest(x, 40, 2) for x in at_s)
    return Trace(TraceMeta(name="tide", format="drawn"), rows)


def test_workers_follow_the_load_up_and_down_and_keep_the_slo() -> None:
    trace = tide()
    rate = len(trace.requests) / trace.requests[-1].arrival_s
    values: dict[str, Any] = {"costs": Costs(prefill_s=0.005), "slo_s": {"ttft": 2.0}}
    values |= {"requests": len(trace.requests), "rate_per_s": rate, "cold_start_s": 1.0}
    config = load_config(None, {"router.policy": "least_loaded"}).router
    summaries = []
    for scale in (4, 0):
        setup = Setup(prefill=1, decode=1, scale=scale, **values)
        result = simulate(setup, config, trace, Shape(), Progress())
        summaries.append(result.summary())
        if scale:
            counts = [change["prefill"] for change in result.target["scaled"]]
    top = counts.index(max(counts))
    assert 1 < max(counts) <= 4
    assert counts[:top] == sorted(counts[:top])
    assert counts[top:] == sorted(counts[top:], reverse=True)
    assert counts[-1] == 1
    scaled, fixed = summaries
    assert scaled.ok == len(trace.requests)
    assert scaled.slo is not None
    assert fixed.slo is not None
    assert scaled.slo.attainment > 0.9 > fixed.slo.attainment


@pytest.mark.parametrize(
    "changes",
    [{"scale": 1, "decode": 2}, {"scale": 4, "aggregated": 1}, {"scale": 4, "decode_ranks": 2}],
)
def test_bounds_that_the_workers_exceed_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BenchError, match="--scale"):
        simulated(**changes)
