"""Processes forked from a parent that has imported something already."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from pdserve.process.forkserver import ForkFailed, ForkServer
from workers.main import thread_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    made = ForkServer("os:getpid", tmp_path / "log")
    yield made
    made.close()


async def test_a_fork_runs_a_module_and_reports_its_end(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "fork.log"
    done = await server.start("timeit", "-n", "1", "pass", env=os.environ, log=log)
    assert await done.wait() == 0
    assert "1 loop" in log.read_text()
    with pytest.raises(ProcessLookupError):
        done.kill()
    killed = await server.start("timeit", "import time; time.sleep(60)", env=os.environ)
    killed.kill()
    assert await killed.wait() == -signal.SIGKILL


async def test_a_preload_that_fails_is_reported(tmp_path: Path) -> None:
    server = ForkServer("no_such_module:f", tmp_path / "log")
    with pytest.raises(ForkFailed):
        await server.start("timeit", env=os.environ)
    assert "no_such_module" in (tmp_path / "log").read_text()
    server.close()


async def test_numpy_starts_no_threads_before_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in thread_environment((0, 1)):  # as in a worker with two cores
        monkeypatch.setenv(name, "2")
    server = ForkServer("numpy:array", tmp_path / "log", arguments=("1",))
    done = await server.start("timeit", "-n", "1", "pass", env=os.environ)
    assert await done.wait() == 0
    server.close()
