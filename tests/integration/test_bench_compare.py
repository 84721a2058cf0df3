"""`pdserve bench compare` as a person calls it: two arms of real processes with fake engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from up_process import run_cli, up

from tests.patience import HUNG_S, START_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(HUNG_S)
# What a busy machine does to a measurement, and the result says.
OF_THE_MACHINE = ("sent late", "arms that should have waited used", "other processes used")
FAST = ("--engine", "fake", "--rate", "20", "--set", "worker.engine_args.step_s=0.002")


def compare(*args: str, **more: Any) -> Any:
    # With this policy every request of two tokens or more is handed over.
    policy = ("--set", "router.policy=least_loaded")
    return run_cli("bench", "compare", *FAST, *policy, *args, within_s=START_S, **more)


def left_running(directory: Path) -> list[str]:
    """Processes of arms whose files are in `directory`."""
    lines = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(directory) in line and "--config" in line]


def test_two_arms_are_compared_swept_and_kept(tmp_path: Path) -> None:
    limits = ("--slo-ttft", "2000", "--slo-tpot", "200")
    short = ("--requests", "6", "--rounds", "3", "--sweep", "1", "--probe-seconds", "0.1")
    done = compare(*limits, *short, "--out", str(tmp_path), "--json")
    # Everything else must hold on a busy machine too.
    assert done.returncode in (0, 3), done.stderr
    summary = json.loads(done.stdout)
    reasons = summary["validity"]["invalid"]
    assert [x for x in reasons if not any(said in x for said in OF_THE_MACHINE)] == []
    assert summary["baseline"] == "2A"
    pd, two = summary["arms"]
    assert (pd["name"], two["name"]) == ("1P1D", "2A")
    assert (pd["ok"], two["ok"]) == (18, 18)
    assert pd["transferred"] == 18
    assert two["transferred"] == 0
    assert set(pd["figures"]) >= {"ttft_p50", "tpot_p99", "tt2t_p50", "goodput_per_core"}
    assert set(pd["ratios"]) >= {"ttft_p50", "tpot_p99"}
    assert len(pd["sweep"]["probes"]) == 1
    assert left_running(tmp_path) == []

    whole = json.loads((tmp_path / "result.json").read_text())
    order = [(m["arm"], m["kind"], m["number"]) for m in whole["measurements"]]
    assert order[:6] == [
        ("1P1D", "round", 0),
        ("2A", "round", 0),
        ("2A", "round", 1),
        ("1P1D", "round", 1),
        ("1P1D", "round", 2),
        ("2A", "round", 2),
    ]
    assert whole["settings"]["scale_lengths"] == "1/4"
    assert whole["summary"] == summary
    again = run_cli("bench", "report", str(tmp_path / "result.json"), "--json")
    assert again.returncode == done.returncode
    assert json.loads(again.stdout) == summary
    page = (tmp_path / "report.html").read_text()
    for part in ("TTFT, cumulative", "Goodput against rate", "Requests on workers, 1P1D"):
        assert f'aria-label="{part}"' in page
    assert "<script" not in page
    html = tmp_path / "again.html"
    table = run_cli("bench", "report", str(tmp_path / "result.json"), "--html", str(html)).stdout
    assert html.read_text() == page
    for part in ("TTFT p50", "TT2T p99", "highest rate with 90% attainment", "lengths times 1/4"):
        assert part in table


def test_arms_that_are_not_alike_are_refused_by_the_settings_name(tmp_path: Path) -> None:
    smaller = "2A:worker.engine_args.block_size=32"
    done = compare("--arm-set", smaller, "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "block_size: 1P1D 16, 2A 32" in done.stderr
    assert "--differ block_size" in done.stderr
    assert left_running(tmp_path) == []


def test_a_kv_cache_is_made_equal_on_request(tmp_path: Path) -> None:
    short = ("--arms", "1P1D,1A", "--rounds", "1", "--requests", "2", "--out", str(tmp_path))
    unequal = compare(*short)
    assert unequal.returncode == 2
    assert "kv_cache_tokens" in unequal.stderr
    equal = compare(*short, "--kv-cache-mib", "16")
    assert equal.returncode in (0, 3), equal.stderr
    assert equal.stdout.count("KV cache 65,536 tokens") == 2
    assert left_running(tmp_path) == []


def test_an_endpoint_is_an_arm_whose_settings_nobody_knows(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        url = running.wait_until_serving()["http"]
        out = tmp_path / "out"
        arms = ("--arms", "2A", "--arm", f"peer={url}", "--restart", "--out", str(out))
        done = compare(*arms, "--rounds", "1", "--requests", "3")
    assert done.returncode in (0, 3), done.stderr
    assert "peer: settings unknown" in done.stdout
    whole = json.loads((out / "result.json").read_text())
    assert [arm["face"] for arm in whole["arms"]] == ["http", "http"]
    assert [arm["kind"] for arm in whole["arms"]] == ["started", "endpoint"]
    assert left_running(out) == []


def test_an_arm_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = compare("--set", "worker.engine_args.nonsense=1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "1P1D did not start" in done.stderr
    assert "nonsense" in done.stderr
    assert left_running(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--sweep"], "--sweep needs --slo-ttft or --slo-tpot"),
        (["--rounds", "0"], "--rounds 0 measures nothing"),
        (["--arms", "2A"], "at least two arms"),
        (["--baseline", "3A"], "--baseline 3A is not an arm"),
        (["--arm", "x=http://h", "--face", "grpc"], "driven over HTTP"),
        (["--cores", "4096"], "--cores 4096: this process may use"),
        (["--trace", "none"], "no trace 'none'"),
        (["--set", "up.prefill=x"], "up.prefill"),
        (["--out", "/proc/nothing"], "--out /proc/nothing"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(args: list[str], message: str) -> None:
    done = compare(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "is ready after" not in done.stderr
