"""A task of the router runs until its owner leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.background import background
from tests.patience import WAIT_S

if TYPE_CHECKING:
    import pytest


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
