"""Processes that benchmarks start: paused with all they started, and never left behind."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks.errors import BenchError
from benchmarks.processes import Child
from tests.patience import HUNG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

WITH_A_CHILD = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); sys.exit(child.wait())"
)


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    child = Child("a server", tmp_path / "log")
    child.start([sys.executable, "-c", WITH_A_CHILD])
    family = psutil.Process(child.pid)
    # Before it is a program of its own, its parent cannot be stopped (vfork).
    await until(lambda: [x.name() for x in family.children()] == ["sleep"])
    started = [family, *family.children()]
    yield child
    await child.stop(signal.SIGKILL)
    for process in started[1:]:
        process.kill()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HUNG_S):
        while not holds():  # noqa: ASYNC110 - the kernel has no event for it
            await asyncio.sleep(0.01)


def all_are(child: Child, is_stopped: bool) -> Callable[[], bool]:
    process = psutil.Process(child.pid)
    family = [process, *process.children()]
    return lambda: all((x.status() == psutil.STATUS_STOPPED) is is_stopped for x in family)


async def test_a_paused_process_stands_still_with_what_it_started(child: Child) -> None:
    child.pause()
    child.pause()
    await until(all_are(child, is_stopped=True))
    child.resume()
    child.resume()
    await until(all_are(child, is_stopped=False))


async def test_whoever_pauses_and_dies_leaves_nothing_paused(child: Child) -> None:
    child.pause()
    await until(all_are(child, is_stopped=True))
    assert child._pause is not None
    assert child._pause.stdin is not None
    child._pause.stdin.close()  # what the kernel does for the dead
    await until(all_are(child, is_stopped=False))


async def test_a_paused_process_ends_in_its_own_order(tmp_path: Path) -> None:
    child = Child("a server", tmp_path / "log")
    orderly = "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('orderly')))"
    child.start([sys.executable, "-c", f"{orderly}; print('up', flush=True); signal.pause()"])
    await child.until_file(tmp_path / "log")
    await until(lambda: "up" in child.tail())
    child.pause()
    await child.stop()
    assert "orderly" in child.tail()
    assert not child.is_alive
    with pytest.raises(BenchError, match="ended"):
        child.pause()
