"""What every request should be answered: by one engine, to which nothing happens."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.answers import Outcome
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.chaos.asking import Asker
    from benchmarks.chaos.asks import Ask

_AT_ONCE: Final = 8


async def answer_all(
    asker: Asker, asks: Sequence[Ask], doing: Callable[[str], None]
) -> dict[int, Outcome]:
    """By number. Raises :class:`BenchError` where any of them fails."""
    found: dict[int, Outcome] = {}
    todo = iter(asks)

    async def one_after_the_other() -> None:
        for ask in todo:
            found[ask.number] = await answer(asker, ask)
            doing(f"{len(found)} of {len(asks)} right answers")

    await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))
    return found


async def answer(asker: Asker, ask: Ask) -> Outcome:
    """The right one. Raises :class:`BenchError`."""
    outcome = Outcome(ask.number, time.monotonic())
    await asker.ask(ask, outcome)
    if outcome.ending != "ok":
        raise BenchError(f"request {ask.number} ({ask.kind}) alone: {outcome.error}")
    return outcome
