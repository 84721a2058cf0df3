"""A short comparison of real engines, as `pdserve bench compare` makes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import START_S

# What a busy machine does to a measurement, and the result says.
OF_THE_MACHINE = ("sent late", "idle variants used", "other processes used")
ROOT = Path(__file__).resolve().parents[2]


def test_variants_of_three_kinds_are_compared(tmp_path: Path) -> None:
    arms = ("--arms", "1P1D,nixl,1A", "--kv-cache-mib", "128")
    policy = ("--set", "router.policy=least_loaded")
    short = ("--rounds", "1", "--requests", "6", "--rate", "3", "--scale-lengths", "1/16")
    limits = ("--slo-ttft", "60000", "--slo-tpot", "10000")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve", "bench", "compare"),
            *(*arms, *policy, *short, *limits, "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        check=False,
    )
    # 3: the machine was busy; then that is all that may be wrong.
    assert done.returncode in (0, 3), done.stderr
    whole = json.loads((tmp_path / "result.json").read_text())
    reasons = whole["summary"]["validity"]["invalid"]
    assert [x for x in reasons if not any(said in x for said in OF_THE_MACHINE)] == []
    pd, nixl, one = (found["settings"] for found in whole["variants"])
    for other in (nixl, one):
        assert other["of_workers"] == pd["of_workers"]
        assert other["cores"] == pd["cores"]
        assert other["kv_cache_tokens"] == pytest.approx(pd["kv_cache_tokens"], rel=0.01)
    assert pd["of_workers"]["engine"] == ["vllm 0.32.0"]
    assert nixl["workers"] == {"prefill": 1, "decode": 1}
    first, second, third = whole["summary"]["arms"]
    assert (first["ok"], second["ok"], third["ok"]) == (6, 6, 6)
    sent = [r for m in whole["measurements"] if m["variant"] == "1P1D" for r in m["records"]]
    # An answer of one token ends at prefill: nothing need move.
    moving = sum(record["output_tokens"] > 1 for record in sent)
    assert moving > 0
    assert (first["transferred"], third["transferred"]) == (moving, 0)
    assert first["figures"]["attainment"]["value"] == 1.0
