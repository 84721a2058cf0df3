"""`pdserve chaos` as a person runs it, against real processes with fake engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from up_process import run_cli

from tests.patience import HUNG_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--engine", "fake", "--requests", "8", "--rate", "8")

pytestmark = pytest.mark.timeout(HUNG_S)


def chaos(directory: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, result, and what it said."""
    path = directory / "result.json"
    ended = run_cli(
        *("chaos", *QUICK, "--run-dir", str(directory / "run"), "--json", str(path), *args),
        within_s=HUNG_S,
    )
    said = ended.stdout + ended.stderr
    return ended.returncode, json.loads(path.read_text()) if path.exists() else {}, said


def test_rows_pass_and_say_what_was_hit(tmp_path: Path) -> None:
    rows = ("drop_transfers", "old_epoch", "kill_all", "kill_router", "kill_router_of_two")
    code, result, said = chaos(tmp_path, "--rows", ",".join(rows))
    assert code == 0, said
    assert [row["name"] for row in result["rows"]] == list(rows)
    assert "5 of 5 rows passed" in said
    for row in result["rows"]:
        assert row["passed"], row
        assert row["requests"] >= 8
        assert row["failed"] == 0
    drop, kill, everyone, router, of_two = result["rows"]
    assert sum(kill["fallbacks"].values()) >= 1
    # The old life is shut out, and the new one stays.
    assert "registration: FAILED_PRECONDITION" in kill["notes"]
    assert sum(drop["fallbacks"].values()) >= 1
    assert router["excused"] >= 1
    assert everyone["excused"] >= 1
    assert sum("told" in note for note in everyone["notes"]) >= 1
    assert of_two["excused"] == 0
    assert result["left"] == []


def test_a_soak_accounts_for_every_request(tmp_path: Path) -> None:
    code, result, said = chaos(tmp_path, "--soak", "8")
    assert code == 0, said
    assert sum(result["ended"].values()) == result["requests"] == result["compared"] > 0
    assert sum(n for what, n in result["done"].items() if what.startswith("kill ")) >= 1
    assert {x["name"] for x in result["memory"]} >= {"router", "up", "prefill-0", "decode-0"}


def test_an_overload_is_refused_in_words_and_gone_when_it_is_over(tmp_path: Path) -> None:
    limits = ("--set", "router.max_running_requests=4", "--set", "router.max_queued_requests=4")
    code, result, said = chaos(tmp_path, "--overload", "3", "--times", "5", *limits)
    assert result["fates"].get("failed", 0) == result["wrong_answers"] == 0, said
    assert result["refused_untold"] == result["leaked_blocks"] == 0, said
    assert result["fates"]["refused"] > 0
    assert result["fates"]["served"] > 0
    assert result["left"] == []
    assert set(result["memory_mib"]) >= {"router", "up", "prefill-0", "decode-0"}
    # How soon it is normal again is the machine's affair; that it is told is not.
    assert (code == 0) == result["passed"] == (result["normal_s"] is not None)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pdserve", "chaos", *QUICK, "--rows", "slow_clients"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait(WAIT_S)
    assert process.stderr is not None
    process.stderr.close()


def test_ctrl_c_ends_all_processes(running: subprocess.Popen[str]) -> None:
    assert running.stderr is not None
    while "start:" not in running.stderr.readline():
        assert running.poll() is None
    children: list[psutil.Process] = []
    while len(children) < 4:
        assert running.poll() is None
        children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert running.wait(WAIT_S) == 130
    _, alive = psutil.wait_procs(children, WAIT_S)
    assert alive == []
