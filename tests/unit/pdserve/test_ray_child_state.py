"""The state of a Ray actor's child process across its restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.deploy.local.restarts import Restarts
from pdserve.deploy.ray.child_state import ChildState

if TYPE_CHECKING:
    from pathlib import Path

READY = {"ready": {"http": "a:1"}}


@pytest.fixture
def child(tmp_path: Path) -> ChildState:
    made = ChildState(tmp_path / "log", Restarts(60.0))
    made.start()
    return made


def test_a_process_reports_what_it_does_and_then_its_addresses(child: ChildState) -> None:
    child.report({"doing": "loading m"}, warm=False)
    assert (child.is_ready, child.doing, child.broken) == (False, "loading m", "")
    child.report(READY, warm=True)
    assert child.row() == {
        "ready": True,
        "doing": "loaded, takes no requests",
        "failure": "",
        "broken": "",
        "crash_loop": "",
        "lives": 1,
        "log": str(child.log),
        "http": "a:1",
    }
    child.take_requests(warm=False)
    assert child.doing == "serving"


def test_only_an_end_before_it_was_first_ready_says_that_it_is_broken(child: ChildState) -> None:
    child.report({"failed": "no model"}, warm=False)
    assert child.died(1, 0.0) > 0
    assert child.broken == "no model"
    child.start()
    child.report(READY, warm=False)
    child.begin_anew()
    assert (child.is_ready, child.doing) == (False, "restarting")
    child.died(-9, 0.0)
    assert child.broken is None
    assert child.is_crash_looping
    assert child.doing.startswith("crash-looping, killed by signal 9 (SIGKILL); restarted in ")
