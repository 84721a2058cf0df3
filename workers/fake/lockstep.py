"""Rounds of fake engines that are the ranks of one data-parallel group, in one process."""

from __future__ import annotations

import asyncio

# Lets all ranks that are ready at the same moment join a round.
_JOIN_S = 1e-6


class FakeLockstep:
    """Steps the ranks of one group together, each step as long as the longest. A rank without work
    does not step. State: the round that ranks join, or that runs."""

    def __init__(self) -> None:
        self._round: asyncio.Task[float] | None = None
        self._is_running = False
        self._longest_s = 0.0

    async def between_rounds(self) -> None:
        """Wait for the end of a running round. Requests that arrive during it are computed in the
        next one."""
        while self._round is not None and self._is_running:
            await asyncio.shield(self._round)

    async def step(self, seconds: float) -> float:
        """Make a step of `seconds` in the next round. Return the length of the round, at whose end
        this returns."""
        if self._round is None:
            self._round = asyncio.create_task(self._run(), name="fake-lockstep-round")
        self._longest_s = max(self._longest_s, seconds)
        return await asyncio.shield(self._round)

    async def _run(self) -> float:
        await asyncio.sleep(_JOIN_S)
        self._is_running, length_s = True, self._longest_s
        await asyncio.sleep(length_s)
        self._round, self._is_running, self._longest_s = None, False, 0.0
        return length_s
