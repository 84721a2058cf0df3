"""What holds for every test: a loop that a test leaves has no task of its making in it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ENDING_S = 2.0


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Set up before every other fixture of a test, so that it looks after they cleaned up."""
    before = asyncio.all_tasks()
    yield
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    if leaked:
        # gRPC ends its own tasks a moment after `stop` has returned.
        _, leaked = await asyncio.wait(leaked, timeout=ENDING_S)
    assert not leaked, f"still running: {', '.join(sorted(map(repr, leaked)))}"
