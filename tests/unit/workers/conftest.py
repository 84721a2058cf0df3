"""Every test here ends with the tasks that it began with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_OURS = ("fake-", "attach-", "registration-", "worker-", "router-side")


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    yield
    left = [x.get_name() for x in asyncio.all_tasks() if x.get_name().startswith(_OURS)]
    assert not left
