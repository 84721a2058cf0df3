"""Rates, quantiles and SLO attainment between two scrapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from pdserve.cli import build_parser
from pdserve.cli.top import (
    attainment,
    costs,
    growth,
    kv_flow,
    mean,
    quantile,
    read,
    summary,
    view,
)

BOUNDS = (0.1, 0.2, 0.4, 0.8)


class Source:
    """Return a registry like the router's, with two models."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Counter("tokens", "", ["model"], registry=self.registry)
        self.ttft = Histogram("ttft_seconds", "", ["model"], buckets=BOUNDS, registry=self.registry)

    def read(self) -> dict[tuple[str, str], float]:
        return read(generate_latest(self.registry).decode())


def test_growth_is_of_the_interval_alone_and_over_all_labels() -> None:
    source = Source()
    source.tokens.labels("a").inc(100)
    before = source.read()
    source.tokens.labels("a").inc(30)
    source.tokens.labels("b").inc(10)
    assert growth(before, source.read())["tokens_total", ""] == 40
    assert growth(before, before)["tokens_total", ""] == 0


def test_quantiles_are_bounds_of_buckets() -> None:
    source = Source()
    source.ttft.labels("a").observe(5.0)  # before the interval
    before = source.read()
    for _ in range(50):
        source.ttft.labels("a").observe(0.15)
        source.ttft.labels("b").observe(0.3)
    grown = growth(before, source.read())
    quantiles = [quantile(grown, "ttft_seconds", share) for share in (0.25, 0.5, 0.75)]
    assert quantiles == [0.2, 0.2, 0.4]
    assert mean(grown, "ttft_seconds") == pytest.approx(0.225)
    attained = [attainment(grown, "ttft_seconds", limit) for limit in (0.05, 0.2, 0.3, 0.4)]
    assert attained == [0.0, 0.5, 0.5, 1.0]


def test_of_one_request_all_quantiles_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    registry = CollectorRegistry()
    ttft = Histogram("pdserve_time_to_first_token_seconds", "", buckets=BOUNDS, registry=registry)
    ttft.observe(0.35)
    found = summary(read(generate_latest(registry).decode()), 2.0, 1.0, 0.1)
    assert found["latency_s"]["TTFT"] == {"mean": 0.35, "p50": 0.4, "p90": 0.4, "p99": 0.4}
    state: dict[str, Any] = {"workers": [], "roles": [], "kv_flow": [], "ejected_pairs": []}
    state |= {"on_demand": [], "running": 0.0, "queued": 0.0}
    Console(width=60).print(view("http://here", found | state))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("TTFT ")]
    assert line.split() == ["TTFT", "350", "ms", *(["≤", "400", "ms"] * 3)]


def test_targets_are_milliseconds() -> None:
    args = build_parser().parse_args(["top", "--slo-ttft", "1500"])
    assert (args.slo_ttft, args.slo_tpot) == (1.5, 0.1)


def test_beyond_the_last_bound_nothing_is_made_up() -> None:
    source = Source()
    source.ttft.labels("a").observe(60.0)
    assert quantile(source.read(), "ttft_seconds", 0.99) == math.inf
    assert attainment(source.read(), "ttft_seconds", 30.0) == 0.0


def test_without_observations_there_is_no_figure() -> None:
    source = Source()
    source.ttft.labels("a").observe(0.1)
    grown = growth(source.read(), source.read())
    assert quantile(grown, "ttft_seconds", 0.5) is None
    assert attainment(grown, "ttft_seconds", 1.0) is None
    assert quantile(grown, "unknown", 0.5) is None


def test_a_router_that_was_started_again_counts_from_zero() -> None:
    old, new = Source(), Source()
    old.tokens.labels("a").inc(1000)
    for _ in range(9):
        old.ttft.labels("a").observe(0.7)
    new.tokens.labels("a").inc(7)
    new.ttft.labels("a").observe(0.15)
    grown = growth(old.read(), new.read())
    assert grown["tokens_total", ""] == 7
    assert quantile(grown, "ttft_seconds", 0.5) == 0.2


@example([0.05, 0.1, 0.1, *[1.0] * 7], 0.3)  # 0.1 * 3 / 3 is more than 0.1
@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=50), st.floats(0.01, 0.99))
def test_a_quantile_is_the_bound_over_the_true_one(values: list[float], share: float) -> None:
    source = Source()
    for value in values:
        source.ttft.labels("a").observe(value)
    found = quantile(source.read(), "ttft_seconds", share)
    assert found is not None
    true = sorted(values)[min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))]
    assert found == min((b for b in BOUNDS if true <= b), default=math.inf)


def test_invalid_metrics_text_is_refused() -> None:
    with pytest.raises(ValueError, match="could not"):
        read("<html>{")


def test_an_idle_service_has_a_summary_and_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary({}, 2.0, 2.0, 0.2)
    assert found["requests_per_s"] == 0
    assert found["slo"]["ttft_attained"] is None
    assert found["latency_s"]["TTFT"]["p99"] is None
    state: dict[str, Any] = {"workers": [], "roles": [], "kv_flow": [], "ejected_pairs": []}
    state["on_demand"] = [{"model": "m", "text": "no worker until it is asked for"}]
    Console().print(view("http://here", found | state | {"running": 0.0, "queued": 0.0}))
    shown = capsys.readouterr().out
    assert "no worker is registered" in shown
    assert "started on demand: m: no worker until it is asked for" in shown
    assert "cost of a million tokens" not in shown


def test_costs_are_those_of_the_tokens_of_the_interval() -> None:
    registry = CollectorRegistry()
    cost = Counter("pdserve_cost", "", ["role", "kind"], registry=registry)
    for role, kind, amount in (
        ("p", "prefill", 2),
        ("d", "decode", 3),
        ("a", "decode", 1),
        ("p", "idle", 4),
    ):
        cost.labels(role, kind).inc(amount)
    for name, count in (("prompt", 4e6), ("generation", 2e6)):
        Counter(f"pdserve_{name}_tokens", "", registry=registry).inc(count)
    assert costs(read(generate_latest(registry).decode())) == {
        "prompt": 0.5,
        "generated": 2.0,
        "all": 5.0,
    }
    assert set(costs({}).values()) == {None}


def test_kv_flow_is_what_a_start_of_a_worker_moved_in_the_interval() -> None:
    def row(instance: str, **totals: int) -> dict[str, Any]:
        kv = {"totals": totals, "ledger": {"pinned_blocks": 3}, "links": {"shm": 1}}
        return {"worker_id": "d", "instance_id": instance, "kv": kv}

    before = [row("1", received_bytes=100, failures=1), {"instance_id": "2", "kv": None}]
    (same,) = kv_flow(before, [row("1", received_bytes=300, failures=2)], 2.0)
    assert (same["received_bytes_per_s"], same["sent_bytes_per_s"], same["failed"]) == (100, 0, 1)
    (again,) = kv_flow(before, [row("3", received_bytes=50)], 2.0)
    assert again["received_bytes_per_s"] == 25.0
