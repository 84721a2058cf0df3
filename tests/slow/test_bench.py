"""`pdserve bench` as a person calls it: services of real processes with fake engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.commands import ROOT, run, run_cli
from tests.support.pdserve_up import up
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from pathlib import Path

# What a busy machine does to a measurement, and the result says.
OF_THE_MACHINE = ("sent late", "idle variants used", "other processes used")
FAST = ("--engine", "fake", "--rate", "20", "--set", "worker.engine_args.step_s=0.002")
# With this policy every request of two tokens or more is handed over.
COMPARE = ("bench", "compare", *FAST, "--set", "router.policy=least_loaded")


def compare(*args: str) -> Any:
    return run_cli(*COMPARE, *args, within_s=START_S)


def left_running(directory: Path) -> list[str]:
    """Return the processes of variants whose files are in `directory`."""
    lines = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(directory) in line and "--config" in line]


def test_two_variants_are_compared_swept_and_kept(tmp_path: Path) -> None:
    limits = ("--slo-ttft", "2000", "--slo-tpot", "200")
    short = ("--requests", "6", "--rounds", "3", "--sweep", "1", "--probe-seconds", "0.1")
    done = compare("--arms", "1P1D,2A", *limits, *short, "--out", str(tmp_path), "--json")
    assert done.returncode in (0, 3), done.stderr
    summary = json.loads(done.stdout)
    reasons = summary["validity"]["invalid"]
    assert [x for x in reasons if not any(said in x for said in OF_THE_MACHINE)] == []
    pd, two = summary["arms"]
    assert [(x["name"], x["ok"]) for x in (pd, two)] == [("1P1D", 18), ("2A", 18)]
    assert (pd["transferred"], two["transferred"]) == (18, 0)
    assert set(pd["figures"]) >= {"ttft_p50", "tpot_p99", "tt2t_p50", "goodput_per_core"}
    assert set(pd["ratios"]) >= {"ttft_p50", "tpot_p99"}
    assert len(pd["sweep"]["probes"]) == 1
    assert left_running(tmp_path) == []

    whole = json.loads((tmp_path / "result.json").read_text())
    assert whole["is_complete"]
    assert whole["summary"] == summary
    order = [m["variant"] for m in whole["measurements"]]
    assert order[:6] == ["1P1D", "2A"] * 3
    again = run_cli("bench", "report", str(tmp_path / "result.json"), "--json")
    assert json.loads(again.stdout) == summary
    assert 'aria-label="TTFT, cumulative"' in (tmp_path / "report.html").read_text()


def test_variants_that_differ_are_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    smaller = "2A:worker.engine_args.block_size=32"
    done = compare("--arm-set", smaller, "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "block_size: 1P1D 16, 2A 32" in done.stderr
    assert "--differ block_size" in done.stderr
    assert left_running(tmp_path) == []


def test_an_interrupted_comparison_prints_its_rounds_and_continues(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pdserve", *COMPARE, "--requests", "3", "--rounds"]
    process = subprocess.Popen(
        [*words, "1000", "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    result = tmp_path / "result.json"
    until_s = time.monotonic() + START_S
    while not result.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 130
    assert "incomplete: the run was interrupted" in out
    assert "these are the rounds so far" in err
    before = json.loads(result.read_text())
    assert not before["is_complete"]
    assert left_running(tmp_path) == []
    rounds = len(before["measurements"]) // 2 + 1
    done = compare("--requests", "3", "--rounds", str(rounds), "--resume", str(tmp_path))
    assert done.returncode in (0, 3), done.stderr
    after = json.loads(result.read_text())
    assert after["is_complete"]
    assert after["measurements"][: len(before["measurements"])] == before["measurements"]
    assert len(after["measurements"]) == 2 * rounds
    other = compare("--requests", "4", "--resume", str(tmp_path))
    assert other.returncode == 2
    assert "--resume: requests is 4, not 3 as kept" in other.stderr


def test_a_running_endpoint_is_a_variant_of_unknown_settings(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        url = running.wait_until_serving()["http"]
        out = tmp_path / "out"
        variants = ("--arms", "2A", "--arm", f"peer={url}", "--out", str(out))
        done = compare(*variants, "--rounds", "1", "--requests", "3")
    assert done.returncode in (0, 3), done.stderr
    assert "peer: settings unknown" in done.stdout
    whole = json.loads((out / "result.json").read_text())
    assert [(x["api"], x["kind"]) for x in whole["variants"]] == [
        ("http", "started"),
        ("http", "endpoint"),
    ]


def test_a_variant_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    done = compare("--set", "worker.engine_args.nonsense=1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "1P1D did not start" in done.stderr
    assert "nonsense" in done.stderr
    assert left_running(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        (
            "kv",
            ("--blocks", "8", "--block-kib", "16", "--cache-mib", "1", "--only", "tcp"),
            {"transport", "blocks", "block_bytes", "ratio_to_memcpy"},
        ),
        (
            "router",
            ("--quick", "--only", "pdserve,direct"),
            {"router", "cpu_us_per_token", "cpu_us_per_request", "p99_ms"},
        ),
        (
            "batch",
            ("--engine", "fake", "--requests", "8", "--rate", "20"),
            {"ttft p50, ms", "ttft p99, ms", "failed", "lines/s"},
        ),
        (
            "long_prompts",
            ("--only", "pdserve", "--model", "demo", "--clients", "2", "--bytes", "80000"),
            {"router", "first: p50_ms", "later: cpu_ms"},
        ),
        (
            "unloaded",
            ("--engine", "fake", "--lengths", "64", "--tokens", "8"),
            {"prompt_tokens", "ttft_ms ratio", "e2e_ms ratio"},
        ),
    ],
)
def test_a_micro_benchmark_prints_rows(
    name: str, options: tuple[str, ...], fields: set[str]
) -> None:
    words = [sys.executable, "-m", "benchmarks.micro", name, "--rounds", "1", "--json", *options]
    rows = json.loads(run(*words, within_s=START_S, cwd=ROOT))["rows"]
    assert rows
    assert fields <= set(rows[0])


def test_chaos_counts_what_clients_notice(tmp_path: Path) -> None:
    done = run_cli(
        "bench",
        "chaos",
        "--engine",
        "fake",
        "--requests",
        "8",
        "--json",
        "--only",
        "kill_router_of_two",
        "--run-dir",
        str(tmp_path),
        within_s=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["fault"], row["hit"]) == ("kill_router_of_two", True)
    assert (row["failed"], row["wrong_tokens"], row["leaked_blocks"]) == (0, 0, 0)
    assert left_running(tmp_path) == []


def test_variants_of_real_engines_are_compared(tmp_path: Path) -> None:
    arms = ("--arms", "1P1D,1A", "--kv-cache-mib", "128")
    policy = ("--set", "router.policy=least_loaded")
    short = ("--rounds", "1", "--requests", "6", "--rate", "3", "--scale-lengths", "1/16")
    limits = ("--slo-ttft", "60000", "--slo-tpot", "10000")
    args = (*arms, *policy, *short, *limits, "--out", str(tmp_path))
    done = run_cli("bench", "compare", *args, within_s=2 * START_S)
    # 3: the machine was busy; then that is all that may be wrong.
    assert done.returncode in (0, 3), done.stderr
    whole = json.loads((tmp_path / "result.json").read_text())
    reasons = whole["summary"]["validity"]["invalid"]
    assert [x for x in reasons if not any(said in x for said in OF_THE_MACHINE)] == []
    pd, one = (found["settings"] for found in whole["variants"])
    assert one["of_workers"] == pd["of_workers"]
    assert one["cores"] == pd["cores"]
    assert one["kv_cache_tokens"] == pytest.approx(pd["kv_cache_tokens"], rel=0.01)
    assert pd["of_workers"]["engine"] == ["vllm 0.32.0"]
    first, second = whole["summary"]["arms"]
    assert (first["ok"], second["ok"]) == (6, 6)
    sent = [r for m in whole["measurements"] if m["variant"] == "1P1D" for r in m["records"]]
    # An answer of one token ends at prefill: nothing need move.
    moving = sum(record["output_tokens"] > 1 for record in sent)
    assert moving > 0
    assert (first["transferred"], second["transferred"]) == (moving, 0)
    assert first["figures"]["attainment"]["value"] == 1.0


def test_chaos_on_real_engines_costs_no_answer_and_leaves_nothing(tmp_path: Path) -> None:
    scenarios = ("corrupt_transfers", "abort_storm", "kill_decode")
    options = ("--only", ",".join(scenarios), "--prefill", "1", "--requests", "9", "--json")
    ended = run_cli("bench", "chaos", *options, "--run-dir", str(tmp_path), within_s=START_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [row["fault"] for row in rows] == list(scenarios)
    assert all(row["passed"] for row in rows)
    damaged, storm, killed = rows
    assert sum(storm["aborts"].values()) == storm["allowed_failures"] > 0
    assert (storm["deaths"], storm["hangs"]) == ([], 0)
    assert any(step.endswith(":transfer_corrupted") for step in damaged["fallbacks"])
    assert sum(killed["fallbacks"].values()) >= 1


def test_answers_of_aggregated_workers_continue(tmp_path: Path) -> None:
    scenarios = ("kill_aggregated", "drain_aggregated", "kill_decode_mixed")
    options = ("--only", ",".join(scenarios), "--engine", "fake", "--requests", "9", "--json")
    ended = run_cli("bench", "chaos", *options, "--run-dir", str(tmp_path), within_s=START_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [(row["fault"], row["passed"]) for row in rows] == [(x, True) for x in scenarios]
    assert all(row["fallbacks"] for row in rows)


def test_a_soak_sends_every_kind_of_request_and_samples_every_process(tmp_path: Path) -> None:
    short = ("--duration", "24", "--churn", "4", "--sample", "0.5", "--rate", "24", "--json")
    ended = run_cli("bench", "soak", *short, "--run-dir", str(tmp_path), within_s=START_S)
    # So short a time says nothing of slopes, and a few failures are too many of few requests.
    assert ended.returncode in (0, 1), ended.stderr
    result = json.loads(ended.stdout)
    assert ended.returncode == (0 if result["passed"] else 1)
    assert {kind for kind, ends in result["requests"].items() if ends.keys() - {"failed"}} >= {
        *("stream", "whole", "abort", "grpc", "keyed", "conversation")
    }, result["errors"]
    assert result["errors"] == []
    assert result["workers_joined"] >= 2
    measured = {(x["process"].split(" (")[0], x["measure"]) for x in result["slopes"]}
    of_each = ("memory", "descriptors", "threads")
    for name in ("router", "prefill-0", "decode-0"):
        assert {(name, x) for x in (*of_each, "tasks", "series")} <= measured
    assert {("all processes", x) for x in ("memory", "processes", "disk")} <= measured
    assert left_running(tmp_path) == []
