"""The parts of the simulation at scale, each in small: what its figures must show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.simulation.scale import __main__ as command
from benchmarks.simulation.scale import parts
from benchmarks.simulation.scale.pool import pool_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.simulation.scale.pool import Ran

POOL = pool_of(20)


def by_case(found: Iterator[tuple[str, Ran]]) -> dict[str, Ran]:
    return dict(found)


def test_a_pool_is_balanced() -> None:
    large = pool_of(1000)
    workers = large.workers
    assert workers.prefill + workers.decode == 1000
    assert workers.prefill > workers.decode > 0
    assert large.capacity_per_s == pytest.approx(50 * POOL.capacity_per_s, rel=0.2)


def test_below_its_capacity_a_pool_keeps_the_slos_whatever_the_policy() -> None:
    ran = {x.policy: x for _, x in parts.policies(POOL, 8.0, 3.0)}
    assert set(ran) == set(parts.POLICIES)
    assert ran["slo_aware"].kept >= ran["round_robin"].kept - 0.02
    for each in ran.values():
        assert each.refused == 0.0
        assert each.tries >= each.requests
        assert each.decisions_per_s > 0.0


def test_what_twice_the_capacity_asks_does_not_take_from_what_keeps_the_slos() -> None:
    ran = by_case(parts.ramp(POOL, 24.0, 8.0))
    twice = ran["2 x"]
    assert twice.goodput_per_s >= 0.95 * max(x.goodput_per_s for x in ran.values())
    assert twice.goodput_per_s >= 0.85 * POOL.capacity_per_s
    assert twice.refused > 0.3
    assert twice.late < 0.1
    assert ran["0.5 x"].kept > 0.95


def test_weights_keep_a_greedy_tenant_from_the_others() -> None:
    ran = by_case(parts.greedy(POOL, 7.0, 3.0))
    assert ran["as one crowd"].kept < ran["the nine alone"].kept - 0.1
    assert ran["weights, long queue"].kept > ran["as one crowd"].kept + 0.1


def test_a_hot_prefix_is_found_and_does_not_flood_its_holders() -> None:
    ran = {x.policy: x for _, x in parts.hot_prefix(POOL, 10.0, 3.0)}
    for name in ("slo_aware", "prefix_aware"):
        assert ran[name].cached > ran["least_loaded"].cached + 0.05
        assert ran[name].kept >= ran["least_loaded"].kept - 0.02
        assert ran[name].busiest < 4.0


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--workers", "4", "--part", "policies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [x["policy"] for x in rows] == list(parts.POLICIES)
    assert all(x["workers"] == 4 for x in rows)
