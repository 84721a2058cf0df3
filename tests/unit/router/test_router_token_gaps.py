"""The histogram of the gaps between tokens, from frames."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.token_gaps import Pace, TokenGaps


def rendered(gaps: TokenGaps) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(gaps)
    lines = generate_latest(registry).decode().splitlines()
    values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    prefix = "pdserve_inter_token_latency_seconds_"
    return {name.removeprefix(prefix): float(value) for name, _, value in values}


def test_a_frame_counts_a_gap_for_each_token_that_follows_one() -> None:
    gaps = TokenGaps()
    pace = Pace(gaps.of("demo"))
    pace.took(10.0, 2)
    pace.took(10.009, 3)  # one began with it
    pace.took(10.029, 3)
    found = rendered(gaps)
    assert found['count{model="demo"}'] == 5
    assert round(found['sum{model="demo"}'], 6) == 0.078
    assert found['bucket{le="0.0075",model="demo"}'] == 0
    assert found['bucket{le="0.01",model="demo"}'] == 2
    assert found['bucket{le="0.03",model="demo"}'] == 5
    assert found['bucket{le="+Inf",model="demo"}'] == 5


def test_a_worker_that_rested_begins_anew_and_two_workers_are_added_up() -> None:
    gaps = TokenGaps().of("demo")
    one, other = Pace(gaps), Pace(gaps)
    one.took(0.0, 1)
    one.rest()
    one.took(100.0, 1)
    other.took(100.0, 4)
    other.took(109.0, 4)
    assert gaps.counts[-1] == sum(gaps.counts) == 4
    assert gaps.sum == 36.0
