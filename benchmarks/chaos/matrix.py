"""The matrix: every row against one service, beside which one engine gives the right answers."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.asks import TRACE, kinds_of, make_asks
from benchmarks.chaos.faults.by_name import changes_of
from benchmarks.chaos.pair import Pair
from benchmarks.chaos.reference import answer_all
from benchmarks.chaos.result import MatrixResult, host
from benchmarks.chaos.row import run_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.chaos.result import RowResult
    from benchmarks.chaos.scene import Fault
    from benchmarks.chaos.settings import ChaosSettings

# A fault that found nothing to hit is tried again, with other prompts.
TRIES: Final = 3


async def run_matrix(
    settings: ChaosSettings,
    faults: Sequence[Fault],
    directory: Path,
    *,
    doing: Callable[[str, str], None],
    done: Callable[[MatrixResult], None],
) -> MatrixResult:
    """``doing`` hears what happens now (row, text), ``done`` after each row what there is so far.
    Raises :class:`BenchError`."""
    plans = [(fault, settings.with_changes(changes_of(fault))) for fault in faults]
    pair = Pair(plans[0][1], directory)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    result = MatrixResult(
        created=created,
        engine=settings.engine,
        workers=settings.workers,
        model="",
        trace=TRACE,
        host=host(),
        settings={
            "requests": settings.requests,
            "rate_per_s": settings.rate_per_s,
            "seed": settings.seed,
            "kinds": kinds_of(settings.engine),
        },
        rows=[],
    )
    try:
        doing("start", f"router, {settings.workers} workers, and one for the right answers")
        await pair.start()
        result = replace(result, model=pair.service.model)
        for place, (fault, its_settings) in enumerate(plans):
            doing(fault.name, "starting what it happens to")
            await pair.become(its_settings)
            row = await _row(its_settings, fault, place, pair, doing)
            result = replace(result, rows=[*result.rows, row])
            done(result)
    finally:
        doing("stop", "letting all processes end")
        await pair.stop()
    return replace(result, left=pair.left)


async def _row(
    settings: ChaosSettings,
    fault: Fault,
    place: int,
    pair: Pair,
    doing: Callable[[str, str], None],
) -> RowResult:
    for attempt in range(TRIES):
        asks = make_asks(
            settings.requests,
            seed=settings.seed,
            vocab_size=pair.service.vocab_size,
            kinds=kinds_of(settings.engine),
            first=(place * TRIES + attempt) * settings.requests,
        )
        row = await run_row(
            fault,
            pair.service,
            pair.asker,
            asks,
            await answer_all(pair.right, asks, lambda text: doing(fault.name, text)),
            rate_per_s=settings.rate_per_s,
            rng=random.Random(f"{settings.seed}/{place}/{attempt}"),
            doing=lambda text: doing(fault.name, text),
        )
        if row.hit or row.failed or row.wrong_tokens:
            break
    return row
