"""Limits of the disposable processes for input of strangers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from pdserve.errors import Unavailable
from pdserve.process.forkserver import ForkServer
from tests.support.timeouts import WAIT_S
from workers.vllm.fork_pool import ForkPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pytest

# Replies with the process id of its template.
FORK = """
import argparse, os
from pdserve.process.child_pool import calls, connected, reply
_, sock = connected(argparse.ArgumentParser())
next(calls(sock))
reply(sock, b"%d" % os.getppid())
"""


class SlowFork:
    """A fork that has started."""

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


async def test_inputs_whose_clients_leave_do_not_pile_up_at_a_template_that_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, started = asyncio.Event(), list[SlowFork]()

    async def start(
        _: ForkServer, _module: str, *_args: str, env: Mapping[str, str], fds: Sequence[int]
    ) -> SlowFork:
        started.append(SlowFork())
        fork = started[-1]
        await loaded.wait()
        return fork

    monkeypatch.setattr(ForkServer, "start_parent", lambda _: None)
    monkeypatch.setattr(ForkServer, "start", start)
    pool = ForkPool("os:getpid", "timeit", b"", at_once=2, timeout_s=60.0, task="read it")
    runs = [asyncio.create_task(pool.run(b"")) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    for run in runs:
        run.cancel()
    late = [asyncio.create_task(pool.run(b"")) for _ in range(2)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(started) == 2
    for run in late:
        run.cancel()
    loaded.set()
    await asyncio.wait((*runs, *late))
    assert all(run.cancelled() for run in (*runs, *late))
    assert all(fork.is_killed for fork in started)
    pool.close()


async def test_a_template_that_was_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replies.py").write_text(FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ForkPool("pathlib:Path", "replies", b"", at_once=2, timeout_s=WAIT_S, task="read it")
    killed = int(await pool.run(b"x"))
    assert int(await pool.run(b"x")) == killed
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                template = int(await pool.run(b"x"))
            except Unavailable:  # by the killed one
                continue
            if template != killed:
                break
    pool.close()
