"""Comparisons: variants, fairness, figures, the sweep, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare.fairness import differences, judge, settings_of
from benchmarks.compare.result import from_json, to_json
from benchmarks.compare.summary import (
    CLOSE,
    Probe,
    bracket,
    figures_of,
    next_rate,
    summarise_compare,
)
from benchmarks.compare.variants import (
    Variant,
    config_changes,
    parse_variant,
    parse_variants,
    share_cores,
)
from benchmarks.errors import BenchError
from benchmarks.metrics import summarise
from benchmarks.report.page import render_page
from benchmarks.report.tables import figure_rows
from pdserve.types import EngineLimits, Role
from tests.support.benchmark_results import (
    SETTINGS,
    USE,
    failed,
    measured,
    receipt,
    record,
    result,
    rounds,
    variant,
)
from tests.support.router_stack import worker_info

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult
    from pdserve.types import WorkerInfo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1P1D", Variant("1P1D", 1, 1)),
        ("2A", Variant("2A", aggregated=2)),
        ("big=1P2D1A", Variant("big", 1, 2, 1)),
        ("peer=http://h:1/v1", Variant("peer", url="http://h:1/v1")),
        ("vllm-pd", Variant("vllm-pd", 1, 1, is_vllm=True)),
        ("theirs=vllm-2a", Variant("theirs", aggregated=2, is_vllm=True)),
    ],
)
def test_a_variant_is_read(text: str, expected: Variant) -> None:
    assert parse_variant(text) == expected


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (["1P", "2A"], [], "'1P' is not a variant"),
        (["0A", "2A"], [], "'0A' is not a variant"),
        (["a b=2A", "2A"], [], "variant name 'a b'"),
        (["2A", "2A"], [], "two variants have the same name"),
        (["2A"], [], "at least two variants"),
        (["2A", "1P1D"], ["3A:a=1"], "no variant called '3A'"),
        (["2A", "1P1D"], ["2A:a"], "must be NAME:KEY=VALUE"),
    ],
)
def test_a_wrong_variant_is_refused(texts: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_variants(texts, settings)


@pytest.mark.parametrize(
    ("texts", "available", "expected"),
    [
        (["1P1D", "2A"], 2, 2),
        (["1P1D", "2A"], 9, 6),
        (["1P1D", "1A"], 5, 2),
        (["1P2D", "2A"], 6, 6),
    ],
)
def test_all_variants_get_equally_many_cores(
    texts: list[str], available: int, expected: int
) -> None:
    assert share_cores(parse_variants(texts), available) == expected


def test_variants_that_cannot_have_equally_many_cores_are_refused() -> None:
    with pytest.raises(BenchError, match="need 6 cores"):
        share_cores(parse_variants(["1P2D", "2A"]), 4)


def test_the_kv_cache_is_shared_between_the_workers_of_a_variant() -> None:
    (own, _) = parse_variants(["1P1D", "1A"], ["1P1D:router.policy=round_robin"])
    changes = config_changes(own, 4, 64 << 20, "vllm")
    assert changes["worker.engine_args.kv_cache_memory_bytes"] == 32 << 20
    assert changes["up.cores_per_worker"] == 2
    assert changes["router.policy"] == "round_robin"
    with pytest.raises(BenchError, match=r"takes worker\.engine_args\.total_blocks"):
        config_changes(own, 4, 64 << 20, "fake")


def worker(role: Role, **changes: Any) -> WorkerInfo:
    return worker_info("w", role, cores=1, settings={"device": "cpu"}, **changes)


def test_variants_with_different_settings_have_different_names() -> None:
    pd = settings_of([worker(Role.PREFILL), worker(Role.DECODE)])
    assert (pd.cores, pd.kv_cache_tokens, dict(pd.workers)) == (
        2,
        3200,
        {"prefill": 1, "decode": 1},
    )
    alike = settings_of([worker(Role.AGGREGATED), worker(Role.AGGREGATED, total_blocks=101)])
    assert differences({"1P1D": pd, "2A": alike, "peer": None}) == {}
    other = settings_of([worker(Role.AGGREGATED, limits=EngineLimits(9), total_blocks=300)])
    found = differences({"1P1D": pd, "1A": other})
    assert found == {
        "max_num_seqs": "1P1D 8, 1A 9",
        "cores": "1P1D 2, 1A 1",
        "kv_cache_tokens": "1P1D 3200, 1A 4800",
    }
    assert (
        differences({"1P1D": pd, "1A": other}, ("max_num_seqs", "cores", "kv_cache_tokens")) == {}
    )
    gpus = settings_of([worker(Role.PREFILL, gpus=(0, 1))])
    assert gpus.gpus == 2


def test_a_million_tokens_within_the_slo_have_a_price_if_all_workers_have() -> None:
    two = [worker(role, device="cpu", devices=2) for role in (Role.PREFILL, Role.DECODE)]
    records = [record(0), record(1), record(2, ttft_s=3.0)]
    summary = summarise(records, {"ttft": 1.0})
    assert summary.slo is not None
    priced = figures_of(summary, settings_of(two, {"cpu": 1800.0}))
    assert priced["cost"] == pytest.approx(4 * 0.5 / (6 / summary.window_s) * 1e6)
    other = worker(Role.DECODE, device="NVIDIA H100", devices=1)
    assert "cost" not in figures_of(summary, settings_of([*two, other], {"cpu": 1800.0}))


def slow_and_fast(**changes: Any) -> CompareResult:
    three = [*rounds("1P1D", [0.2, 0.4, 0.2]), *rounds("2A", [0.1, 0.2, 0.1])]
    return result(three, **changes)


def test_figures_are_medians_and_ratios_are_of_rounds() -> None:
    summary = summarise_compare(slow_and_fast())
    pd, two = summary.variants
    assert pd.figures["ttft_p50"].value == pytest.approx(0.2)
    assert pd.ratios["ttft_p50"].value == pytest.approx(2.0)
    assert pd.ratios["ttft_p50"].low == pytest.approx(2.0)
    assert two.ratios == {}
    assert pd.figures["attainment"].value == 1.0
    assert pd.figures["goodput_per_core"].value == pytest.approx(pd.figures["goodput"].value / 2)
    assert "goodput_per_gpu" not in pd.figures
    assert {"itl_p50", "attainment"} <= summary.shown.keys()
    assert pd.router_s_per_million_tokens == pytest.approx(3 / 36 * 1e6)
    assert summary.validity.invalid == ()
    assert [x["name"] for x in summary.to_json()["arms"]] == ["1P1D", "2A"]


def test_sessions_are_compared() -> None:
    of_session: dict[str, Any] = {"session": "s", "kept_tokens": 64, "cached_tokens": 48}
    both = [*rounds("1P1D", [0.2] * 3, **of_session), *rounds("2A", [0.4] * 3, **of_session)]
    found = summarise_compare(result(both))
    apart = found.variants[0]
    assert apart.figures["recomputed"].value == 16
    assert apart.ratios["ttft_turn_1"].value == pytest.approx(0.5)
    labels = [row[0][0] for row in figure_rows(found)[1]]
    assert "session time p50, ms" in labels
    assert "TTFT of turn 2 p50, ms" not in labels


def test_a_variant_that_fails_requests_is_not_fast() -> None:
    broken = [measured("1P1D", 0, [record(0), failed(1)])]
    summary = summarise_compare(result([*broken, *rounds("2A", [0.1])]))
    pd = summary.variants[0]
    assert pd.figures["ttft_p99"].value == float("inf")
    assert "ttft_p99" not in pd.ratios
    assert (pd.ok, pd.failed, dict(pd.errors)) == (1, 1, {"HTTP 429: full": 1})


def spoil(**changes: Any) -> CompareResult:
    whole = slow_and_fast()
    first = replace(whole.measurements[0], **changes)
    return replace(whole, measurements=(first, *whole.measurements[1:]))


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (spoil(notes=("decode-0 died",)), "round 1 of 1P1D: decode-0 died"),
        (spoil(processor=replace(USE, idle_s=3.0)), "idle variants used 0.30 cores"),
        (spoil(processor=replace(USE, others_s=200.0)), "other processes used 42% of the cores"),
        (spoil(records=tuple(record(i, sent_s=i + 0.5) for i in range(4))), "sent late"),
        (result([measured("2A", 0, [failed(0)])]), "2A answered no"),
        (
            slow_and_fast(
                variants=(variant("1P1D", settings=replace(SETTINGS, cores=4)), variant("2A"))
            ),
            "the variants differ in cores: 1P1D 4, 2A 2",
        ),
    ],
)
def test_a_disturbed_run_is_invalid_with_the_reason(spoilt: CompareResult, reason: str) -> None:
    assert any(reason in x for x in judge(spoilt).invalid)
    assert "INVALID" in render_page(spoilt)


def test_cautions_do_not_spoil_a_run() -> None:
    peer = variant("peer", kind="endpoint", settings=None)
    found = judge(result(rounds("2A", [0.1]), variants=(variant("2A"), peer), is_complete=False))
    assert found.invalid == ()
    text = "; ".join(found.cautions)
    for part in ("incomplete", "peer: settings unknown", "no intervals below 3 rounds"):
        assert part in text


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(1, 12))
def test_a_sweep_brackets_the_capacity(capacity: float, first: float, limit: int) -> None:
    probes: list[Probe] = []
    while (rate := next_rate(probes, first=first, limit=limit)) is not None:
        probes.append(Probe(rate, 1.0 if rate <= capacity else 0.5))
    assert len(probes) <= limit
    passed, failed_at = bracket(probes)
    assert passed is None or passed <= capacity
    assert failed_at is None or failed_at > capacity
    if len(probes) < limit:
        assert passed is not None
        assert failed_at is not None
        assert failed_at / passed <= CLOSE


def swept() -> CompareResult:
    probes = [
        measured(
            name, number, [record(i, ttft_s=ttft) for i in range(4)], kind="probe", rate_per_s=rate
        )
        for name, ttfts in (("1P1D", (0.1, 0.1)), ("2A", (0.1, 0.9)))
        for number, (rate, ttft) in enumerate(zip((1.0, 2.0), ttfts, strict=True))
    ]
    moved = [
        replace(m, records=tuple(replace(r, receipt=receipt(moved=4096)) for r in m.records))
        for m in rounds("1P1D", [0.2, 0.4, 0.2])
    ]
    return result([*moved, *rounds("2A", [0.1, 0.2, 0.1]), *probes])


def test_a_sweep_compares_the_highest_rates() -> None:
    pd, two = summarise_compare(swept()).variants
    assert pd.sweep is not None
    assert two.sweep is not None
    assert (pd.sweep.passed, two.sweep.passed, two.sweep.failed) == (2.0, 1.0, 2.0)
    assert (pd.sweep.ratio, pd.sweep.per_device) == (2.0, 1.0)


def test_a_result_survives_its_file() -> None:
    whole = swept()
    text = to_json(whole, summarise_compare(whole).to_json())
    assert from_json(json.loads(text)) == whole
    with pytest.raises(BenchError, match="not a result"):
        from_json({"schema": "x"})


def test_the_report_shows_everything_and_loads_nothing() -> None:
    page = render_page(swept())
    for part in (
        "TTFT, cumulative",
        "SLO attainment against rate",
        "Mean time of each phase",
        "Requests on workers, 1P1D",
    ):
        assert f'aria-label="{part}"' in page
    assert 'class="worse"' in page
    for forbidden in ("<script", "http://", "src=", "@import"):
        assert forbidden not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "no request was answered" in render_page(result([measured("2A", 0, [failed(0)])]))
