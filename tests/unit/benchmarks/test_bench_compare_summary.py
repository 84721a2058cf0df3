"""What a comparison comes to, and what makes it invalid: pure functions of its records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from compared import (
    SETTINGS,
    USE,
    arm,
    failed,
    measured,
    receipt,
    record,
    result,
    rounds,
)
from rich.console import Console

from benchmarks.bootstrap import Estimate
from benchmarks.compare.result import CompareResult, dump, from_json, to_json
from benchmarks.compare.summary import CompareSummary, summarise_compare
from benchmarks.compare.sweep import Bracket, Probe
from benchmarks.compare.table import render_compare
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from benchmarks.compare.result import Measurement

PD = rounds("1P1D", [0.1, 0.2, 0.15])
TWO = rounds("2A", [0.2, 0.4, 0.3])


def summary(measurements: list[Measurement]) -> CompareSummary:
    return summarise_compare(result(measurements))


def text(of: CompareResult) -> str:
    console = Console(width=160, record=True, quiet=False, file=None)
    with console.capture() as captured:
        render_compare(of, summarise_compare(of), console)
    return captured.get()


def test_figures_are_medians_over_rounds_and_ratios_are_round_by_round() -> None:
    pd, two = summary(PD + TWO).arms
    assert pd.figures["ttft_p50"].value == pytest.approx(0.15)
    assert two.figures["ttft_p50"].value == pytest.approx(0.3)
    assert pd.figures["ttft_p50"].low == pytest.approx(0.1)
    ratio = pd.ratios["ttft_p50"]
    assert ratio.value == pytest.approx(0.5)
    assert ratio.low == pytest.approx(0.5)
    assert ratio.high == pytest.approx(0.5)
    assert two.ratios == {}
    assert pd.figures["tt2t_p99"].value == pytest.approx(0.05)
    assert pd.figures["itl_p99"].value == pytest.approx(0.05)


def test_limits_are_kept_by_share_and_goodput_is_per_core_too() -> None:
    pd, two = summary(PD + TWO).arms
    assert pd.figures["attainment"] == Estimate(1.0, 1.0, 1.0)
    assert two.figures["attainment"].value == 0.0
    window_s = 3 + 0.15 + 0.1
    assert pd.figures["goodput"].value == pytest.approx(4 / window_s, rel=0.03)
    assert pd.figures["goodput_per_core"].value == pytest.approx(
        pd.figures["goodput"].value / 2, rel=1e-9
    )


def test_where_gpus_do_the_work_throughput_is_per_gpu() -> None:
    two = replace(SETTINGS, gpus=2)
    probes = [measured("1P1D", 0, [record(0, ttft_s=0.1)], kind="probe", rate_per_s=3)]
    of = result([*PD, *probes, *TWO], [arm("1P1D", settings=two), arm("2A", settings=two)])
    pd = summarise_compare(of).arms[0]
    assert pd.figures["goodput_per_gpu"].value == pytest.approx(pd.figures["goodput"].value / 2)
    tokens = pd.figures["output_tokens"].value
    assert pd.figures["output_tokens_per_gpu"].value == pytest.approx(tokens / 2)
    assert "goodput_per_core" not in pd.figures
    assert pd.sweep is not None
    assert (pd.sweep.per_core_per_s, pd.sweep.per_gpu_per_s) == (None, 1.5)
    printed = text(of)
    assert "2 GPUs and 2 cores" in printed
    assert "1.50 per GPU" in printed


def test_failures_miss_every_limit_and_are_infinitely_slow() -> None:
    spoilt = [
        measured("1P1D", n, [record(0, ttft_s=0.1), failed(1), failed(2), record(3, ttft_s=0.1)])
        for n in range(3)
    ]
    pd = summary(spoilt + TWO).arms[0]
    assert (pd.ok, pd.failed, pd.requests) == (6, 6, 12)
    assert pd.figures["attainment"].value == 0.5
    assert pd.figures["ttft_p99"].value == math.inf
    assert "ttft_p99" not in pd.ratios
    assert pd.errors == {"HTTP 429: full": 6}
    assert "inf" in text(result(spoilt + TWO))


def test_merged_chunks_are_said_and_itl_is_left_out() -> None:
    merged = [
        measured("1P1D", n, [record(i, ttft_s=0.1, chunk_tokens=(1, 1, 2)) for i in range(4)])
        for n in range(3)
    ]
    found = summary(merged + TWO)
    assert not found.has_itl
    keys = [figure.key for figure in found.shown]
    assert "icl_p99" in keys
    assert "itl_p99" not in keys
    assert found.arms[0].one_token_chunks == pytest.approx(2 / 3)
    printed = text(result(merged + TWO))
    assert "66.7% of chunks held one token" in printed
    assert "no ITL: 1P1D: 4 requests had chunks of several tokens" in printed


def test_chunks_that_do_not_tell_their_tokens_give_no_itl() -> None:
    over_http = [
        measured("2A", n, [record(i, ttft_s=0.1, chunk_tokens=None) for i in range(4)])
        for n in range(3)
    ]
    found = summary(PD + over_http)
    assert not found.has_itl
    assert found.arms[1].one_token_chunks is None
    assert "tt2t_p50" not in found.arms[1].figures


def test_receipts_say_where_the_time_went_and_what_moved() -> None:
    moved = receipt(moved=4096, prefill="prefill-0", decode="decode-0")
    pd = summary(rounds("1P1D", [0.1] * 3, receipt=moved) + TWO).arms[0]
    assert pd.phases_s["prefill_s"] == pytest.approx(0.08)
    assert (pd.transferred, pd.transfer_bytes) == (12, 12 * 4096)
    assert pd.router_s_per_million_tokens == pytest.approx(3.0 / 36 * 1e6)


def test_a_sweep_is_judged_from_its_records() -> None:
    def probe(arm: str, number: int, rate: float, met: int) -> Measurement:
        records = [record(i, ttft_s=0.1 if i < met else 0.5) for i in range(10)]
        return measured(arm, number, records, kind="probe", rate_per_s=rate)

    probes = [probe("1P1D", 0, 2, 10), probe("1P1D", 1, 4, 9), probe("1P1D", 2, 8, 8)]
    found = summary([*probes, probe("2A", 0, 2, 10), probe("2A", 1, 4, 3)])
    pd, two = found.arms
    assert pd.sweep is not None
    assert two.sweep is not None
    assert pd.sweep.probes == (Probe(2, 1.0), Probe(4, 0.9), Probe(8, 0.8))
    assert pd.sweep.found == Bracket(4, 8)
    assert (pd.sweep.per_core_per_s, pd.sweep.ratio) == (2.0, 2.0)
    printed = text(result([*probes, probe("2A", 0, 2, 10), probe("2A", 1, 4, 3)]))
    assert "4.00 (fails at 8.00)" in printed
    assert "8.00: 80%" in printed


def test_a_sound_run_is_valid() -> None:
    found = summary(PD + TWO).validity
    assert found.invalid == ()
    assert found.cautions == ()


SPOILT = {
    "other chunk size": (
        result(
            PD + TWO,
            [
                arm("1P1D"),
                arm(
                    "2A",
                    settings=replace(
                        SETTINGS,
                        of_workers=SETTINGS.of_workers | {"max_num_batched_tokens": ("256",)},
                    ),
                ),
            ],
        ),
        "the arms differ in max_num_batched_tokens: 1P1D 2048, 2A 256",
    ),
    "other number of GPUs": (
        result(
            PD + TWO,
            [
                arm("1P1D", settings=replace(SETTINGS, gpus=2)),
                arm("2A", settings=replace(SETTINGS, gpus=1)),
            ],
        ),
        "the arms differ in gpus: 1P1D 2, 2A 1",
    ),
    "late client": (
        result(rounds("1P1D", [0.1] * 3, lag_s=0.2) + TWO),
        "round 1 of 1P1D: the client sent late: lag p99 200 ms",
    ),
    "busy idle arms": (
        result([replace(PD[0], processor=replace(USE, idle_arms_s=4.0)), *PD[1:], *TWO]),
        "round 1 of 1P1D: arms that should have waited used 0.40 cores",
    ),
    "a worker died": (
        result([*PD[:2], replace(PD[2], notes=("a process of 1P1D died",)), *TWO]),
        "round 3 of 1P1D: a process of 1P1D died",
    ),
    "other requests": (
        result([measured("1P1D", 0, [record(7, ttft_s=0.1)]), *PD[1:], *TWO]),
        "round 1: the arms were not sent the same requests",
    ),
    "a busy machine": (
        result([replace(x, processor=replace(USE, others_s=24.0)) for x in [*PD, *TWO]]),
        "other processes used 30% of the cores",
    ),
    "no answers": (
        result([measured("1P1D", n, [failed(i) for i in range(4)]) for n in range(3)] + TWO),
        "1P1D answered no request of any round",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_run_is_invalid_and_says_why(what: str) -> None:
    spoilt, reason = SPOILT[what]
    reasons = summarise_compare(spoilt).validity.invalid
    assert any(found.startswith(reason) for found in reasons), reasons
    assert text(spoilt).replace("\n", " ").startswith("INVALID: ")


def test_what_is_meant_to_differ_is_said_and_not_held_against_the_run() -> None:
    spoilt, _ = SPOILT["other chunk size"]
    meant = replace(spoilt, meant_to_differ=("max_num_batched_tokens",))
    found = summarise_compare(meant).validity
    assert found.invalid == ()
    assert found.cautions == ("meant to differ: max_num_batched_tokens: 1P1D 2048, 2A 256",)


def test_cautions_are_said() -> None:
    peer = arm("peer", kind="endpoint", face="http", settings=None)
    busy = [replace(x, processor=replace(USE, others_s=4.0)) for x in PD[:1]]
    found = summarise_compare(
        result(
            [*busy, *rounds("peer", [0.2])],
            [arm("1P1D"), peer],
            baseline="peer",
            host={"cores": 2},
        )
    )
    assert found.validity.invalid == ()
    said = "\n".join(found.validity.cautions)
    for part in ("peer: settings unknown", "no intervals", "other processes used", "all 2 cores"):
        assert part in said


def test_a_result_is_the_same_after_it_was_written_and_read() -> None:
    uneven = record(1, ttft_s=0.1, chunk_tokens=(1, 2, 1))
    timed_out = replace(failed(2), status="timed_out", chunk_s=(2.5,), chunk_tokens=(1,))
    whole = result(
        [
            measured("1P1D", 0, [uneven, timed_out, record(3, ttft_s=0.123457, chunk_tokens=None)]),
            *TWO,
        ],
        [arm("1P1D"), arm("2A", kind="endpoint", settings=None, ready_s=None)],
    )
    again = from_json(json.loads(dump(to_json(whole))))
    assert again == whole
    assert summarise_compare(again) == summarise_compare(whole)


@pytest.mark.parametrize("broken", [[], {"schema": "other"}, {"schema": "pdserve.bench.compare/1"}])
def test_what_is_no_result_is_refused(broken: object) -> None:
    with pytest.raises(BenchError, match=r"not a result|missing or wrong"):
        from_json(broken)
