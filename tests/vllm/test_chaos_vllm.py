"""Four rows of `pdserve chaos` on real vLLM, one service for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("freeze_decode", "corrupt_transfers", "abort_storm", "kill_decode")
PATIENCE_S = 900.0

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(PATIENCE_S + 60)]


def test_answers_are_right_and_nothing_is_left_whatever_is_done_to_a_service(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    options = ["--rows", ",".join(ROWS), "--prefill", "1", "--requests", "9"]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve", "chaos", *options),
            *("--run-dir", str(tmp_path / "run"), "--json", str(path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == list(ROWS)
    assert all(row["passed"] and row["hit"] for row in result["rows"])
    assert result["left"] == []
    damaged, killed = result["rows"][1], result["rows"][3]
    assert any(step.endswith(":transfer_corrupted") for step in damaged["fallbacks"])
    assert sum(killed["fallbacks"].values()) >= 1
