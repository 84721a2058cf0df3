"""A task of the router's own goes on until its owner leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.background import Background
from tests.patience import WAIT_S

if TYPE_CHECKING:
    import pytest


async def test_what_breaks_off_or_ends_is_told_and_begun_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, third = [], asyncio.Event()

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) == 1:
            raise KeyError("lost")
        if len(begun) == 3:
            third.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S):
        async with Background("sweeper", work, restart_s=0.0):
            await third.wait()
            assert [x.get_name() for x in asyncio.all_tasks()].count("sweeper") == 1
    assert begun == [0, 1, 2]
    broke, ended = (record.getMessage() for record in caplog.records)
    assert broke.startswith("sweeper broke off")
    assert ended.startswith("sweeper ended")
    assert "KeyError: 'lost'" in caplog.text
    assert "sweeper" not in [x.get_name() for x in asyncio.all_tasks()]


async def test_leaving_before_anything_ran_leaves_nothing() -> None:
    ran = []

    async def work() -> None:
        ran.append(1)

    async with Background("never", work):
        pass
    assert not ran
    assert len(asyncio.all_tasks()) == 1
