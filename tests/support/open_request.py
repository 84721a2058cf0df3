"""A running request of a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.support.engine_pair import joined
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.client import Client, Delta
    from pdserve.types import Receipt, SamplingParams
    from tests.support.engine_pair import JoinedAnswer


class OpenRequest:
    """One running request: its deltas, by answer."""

    def __init__(
        self, client: Client, ids: Sequence[int], sampling: SamplingParams, **values: Any
    ) -> None:
        self.pieces: list[list[Delta]] = [[] for _ in range(sampling.n)]
        self.last: Delta | None = None
        self._changed = asyncio.Event()
        self._deltas = client.generate(ids, sampling, **values)
        self.task = asyncio.create_task(self._read())

    @property
    def answers(self) -> list[JoinedAnswer]:
        return [joined(*pieces) for pieces in self.pieces]

    @property
    def receipt(self) -> Receipt:
        assert self.last is not None
        assert self.last.receipt is not None
        return self.last.receipt

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return self.receipt.fallbacks

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(delta.token_ids) for pieces in self.pieces for delta in pieces)

    async def _read(self) -> None:
        async for delta in self._deltas:
            self.pieces[delta.index].append(delta)
            self.last = delta
            self._changed.set()

    async def end(self) -> list[JoinedAnswer]:
        """Wait for the last answer and return all."""
        await asyncio.wait_for(asyncio.shield(self.task), WAIT_S)
        return self.answers

    async def until(self, tokens: int) -> None:
        """Wait until the client has this many tokens, or all."""
        async with asyncio.timeout(WAIT_S):
            while self.tokens < tokens and not self.task.done():
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait((changed, self.task), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
