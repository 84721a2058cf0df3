"""The statistics of the shipped traces, which also guard the files themselves."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.describe import describe
from benchmarks.trace import Trace, TraceMeta, TraceRequest, load_trace

GOLDEN: dict[str, dict[str, Any]] = {
    "chat": {
        "requests": 10_000,
        "duration_s": 1787.309283,
        "requests_per_s": 5.595,
        "interarrival_cv": 1.0731,
        "zero_interarrivals": 0.0,
        "burstiness": [(1, 2.681, 1.309), (10, 1.575, 3.086), (60, 1.442, 12.491)],
        "input": (1242.43, 2, 1033.5, 4076.0, 4123.0, 14050),
        "output": (218.405, 7, 136.0, 427.0, 611.0, 1000),
        "single_token_outputs": 0,
        "output_to_input": 0.17579,
        "fits": {2048: 0.8363, 4096: 0.8843, 8192: 0.9999, 16384: 1.0, 32768: 1.0},
    },
    "code": {
        "requests": 8819,
        "duration_s": 3435.948056,
        "requests_per_s": 2.5667,
        "interarrival_cv": 13.1513,
        "zero_interarrivals": 0.0,
        "burstiness": [(1, 26.105, 13.186), (10, 12.792, 71.641), (60, 4.178, 163.965)],
        "input": (2047.848, 3, 1469, 5187.6, 7436.0, 7437),
        "output": (27.883, 6, 13, 55.0, 251.46, 1899),
        "single_token_outputs": 0,
        "output_to_input": 0.013616,
        "fits": {2048: 0.6182, 4096: 0.8575, 8192: 1.0, 16384: 1.0, 32768: 1.0},
    },
    "longchat": {
        "requests": 4000,
        "duration_s": 1301.999,
        "requests_per_s": 3.0722,
        "interarrival_cv": 2.8661,
        "zero_interarrivals": 0.89147,
        "burstiness": [(1, 6.187, 7.183), (10, 1.725, 1.957), (60, 1.197, 2.127)],
        "input": (13312.34, 891, 7874.0, 28981.3, 94410.57, 123192),
        "output": (347.08, 1, 358.0, 605.0, 1157.09, 2000),
        "single_token_outputs": 26,
        "output_to_input": 0.026072,
        "fits": {2048: 0.1895, 4096: 0.2935, 8192: 0.49875, 16384: 0.7315, 32768: 0.91775},
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_shipped_trace_has_the_statistics_it_is_documented_with(name: str) -> None:
    found = describe(load_trace(name))
    lengths = {
        "input": found.input_tokens,
        "output": found.output_tokens,
    }
    assert {
        "requests": found.requests,
        "duration_s": found.duration_s,
        "requests_per_s": found.requests_per_s,
        "interarrival_cv": found.interarrival_cv,
        "zero_interarrivals": found.zero_interarrivals,
        "single_token_outputs": found.single_token_outputs,
        "output_to_input": found.output_to_input,
        "fits": dict(found.fits),
    } == {
        key: pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
        for key, value in GOLDEN[name].items()
        if key not in ("input", "output", "burstiness", "fits")
    } | {"fits": pytest.approx(GOLDEN[name]["fits"], abs=1e-4)}
    for bins, expected in zip(found.burstiness, GOLDEN[name]["burstiness"], strict=True):
        assert (bins.width_s, bins.peak_to_mean, bins.fano) == pytest.approx(expected, rel=1e-3)
    for key, item in lengths.items():
        values = (item.mean, item.min, item.p50, item.p90, item.p99, item.max)
        assert values == pytest.approx(GOLDEN[name][key], rel=1e-4)


def test_longchat_shares_a_third_of_its_tokens_and_almost_every_first_block() -> None:
    reuse = describe(load_trace("longchat")).reuse
    assert reuse is not None
    assert (reuse.block_size, reuse.distinct_blocks) == (512, 71_424)
    assert (reuse.block_hit, reuse.token_hit, reuse.request_hit) == pytest.approx(
        (0.32558, 0.33141, 0.99975), abs=1e-5
    )


def test_a_hit_on_a_partial_last_block_counts_only_its_tokens() -> None:
    rows = (
        TraceRequest(0.0, 6, 1, (0, 1)),
        TraceRequest(1.0, 6, 1, (0, 1)),
        TraceRequest(2.0, 8, 1, (0, 2)),
    )
    reuse = describe(Trace(TraceMeta(name="t", block_size=4), rows)).reuse
    assert reuse is not None
    assert reuse.token_hit == (6 + 4) / 20
    assert reuse.block_hit == (2 + 1) / 6
    assert reuse.request_hit == 2 / 3


def test_ids_of_one_session_are_not_those_of_another() -> None:
    rows = tuple(TraceRequest(float(i), 4, 1, (7,), session_id=s) for i, s in enumerate("abb"))
    meta = TraceMeta(name="t", block_size=4, hash_scope="session")
    reuse = describe(Trace(meta, rows)).reuse
    assert reuse is not None
    assert reuse.request_hit == 1 / 3


def test_a_trace_of_one_moment_has_no_rate() -> None:
    found = describe(Trace(TraceMeta(name="t"), (TraceRequest(0.0, 3, 1), TraceRequest(0.0, 5, 1))))
    assert (found.requests_per_s, found.interarrival_cv, found.burstiness) == (0.0, 0.0, ())
    assert found.zero_interarrivals == 1.0
