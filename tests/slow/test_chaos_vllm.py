"""Scenarios of `pdserve bench chaos` on real vLLM, one service for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ("freeze_decode", "corrupt_transfers", "abort_storm", "kill_decode")
PATIENCE_S = 900.0

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


def test_answers_are_right_and_nothing_is_left(tmp_path: Path) -> None:
    options = ["--only", ",".join(SCENARIOS), "--prefill", "1", "--requests", "9", "--json"]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve", "bench", "chaos", *options),
            *("--run-dir", str(tmp_path / "run")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [row["fault"] for row in rows] == list(SCENARIOS)
    assert all(row["passed"] for row in rows)
    damaged, killed = rows[1], rows[3]
    assert any(step.endswith(":transfer_corrupted") for step in damaged["fallbacks"])
    assert sum(killed["fallbacks"].values()) >= 1
