"""A task of the router runs until its owner leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pdserve.background import background
from router import metrics as module
from router.metrics import measure_loop_lag
from tests.support.timeouts import WAIT_S


async def test_a_task_that_fails_is_logged_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    starts, second = 0, asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise KeyError("lost")
        second.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S), background("sweeper", work, restart_s=0.0):
        await second.wait()
    assert "sweeper failed and is restarted" in caplog.text
    assert "KeyError: 'lost'" in caplog.text
    assert "sweeper" not in [x.get_name() for x in asyncio.all_tasks()]


async def test_the_event_loop_reports_how_late_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [1.0, 1.5, 2.0, 2.125]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    seen: list[float] = []
    with pytest.raises(IndexError):  # when the clock has no more times
        await measure_loop_lag(seen.append, period_s=0.125)
    assert seen == [0.375, 0.0]
