"""When a process that died is started again, and why it died."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.cli import main
from pdserve.deploy.local.restarts import FORGIVEN_AFTER_S, Restarts, death_reason, last_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_pauses_grow_to_the_longest_and_a_long_life_is_forgiven() -> None:
    restarts = Restarts(longest_pause_s=60.0)
    looping = []
    pauses = []
    for _ in range(2000):
        pauses.append(restarts.died(1.0, "x"))
        looping.append(restarts.is_crash_looping)
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses[-1] == 60
    assert looping[:2] == [False, True]
    assert restarts.died(FORGIVEN_AFTER_S, "x") == 1
    assert not restarts.is_crash_looping


@pytest.mark.parametrize(
    ("code", "failure", "reason"),
    [
        (1, "the engine died", "the engine died"),
        (-9, "", "killed by signal 9 (SIGKILL)"),
        (-33, "", "killed by signal 33"),
        (1, "", "exit code 1: RuntimeError: last"),
        (1, "x" * 1000, "x" * 500),
    ],
)
def test_the_reason_is_the_last_error_or_the_exit_status(
    tmp_path: Path, code: int, failure: str, reason: str
) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nRuntimeError: last\n\n")
    assert death_reason(code, failure, log) == reason


def test_lines_below_an_error_do_not_hide_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    noise = [
        "WARNING 11-24 16:00:00 [gpu_model_runner.py:1] slow",
        "(EngineCore pid=7) INFO 11-24 16:00:00 [core.py:1] stops",
        "2026-11-24 16:00:00,123 WARNING router.main: late",
    ]
    log.write_text("\n".join(["MemoryError: cause", *noise]))
    assert last_lines(log, 20) == ["MemoryError: cause"]
    log.write_text("\n".join(noise))
    assert last_lines(log, 2) == noise[1:]


def test_a_hint_after_the_error_is_not_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each command ends like that, so the text is that of the command itself."""
    assert main(["config", "--set", "worker.engine=none"]) == 2
    log = tmp_path / "log"
    log.write_text("INFO start\n" + capfd.readouterr().err)
    assert len(log.read_text().splitlines()) > 2
    assert death_reason(2, "", log).startswith("exit code 2: pdserve: worker.engine: ")


def test_a_process_without_a_log_has_a_reason(tmp_path: Path) -> None:
    assert death_reason(2, "", tmp_path / "none") == "exit code 2"
