"""The end of the processes of `pdserve up`."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdserve.deploy.local import supervisor as module
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess
from pdserve.deploy.local.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_processes_that_hang_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, waits, signals = 100.0, list[float | None](), list[int]()

    async def first(*_: asyncio.Future[int], timeout: float | None = None) -> None:
        nonlocal now
        waits.append(timeout)
        now += timeout or 0.0

    monkeypatch.setattr(module, "_first", first)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    stopping: Any = Supervisor.__new__(Supervisor)
    process: Any = SimpleNamespace(send_signal=signals.append)
    names = ("decode-0", "decode-1")
    stopping._children = {
        name: SupervisedProcess(name, tmp_path, Restarts(1.0), process, ready_at=0.0)
        for name in names
    }
    never = asyncio.get_running_loop().create_future
    stopping._keepers = {name: never() for name in names}
    stopping._signals = SimpleNamespace(killed=never())
    stopping._display = SimpleNamespace(tell=lambda _: None)
    await stopping._end(names, 30.0)
    assert waits == [30.0, 0.0]
    assert signals == [signal.SIGTERM] * 2 + [signal.SIGKILL] * 2
