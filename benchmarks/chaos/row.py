"""One row: requests run, the fault strikes, the service gets whole, and all is accounted for."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.answers import wrong_tokens
from benchmarks.chaos.asking import TIMEOUT_S
from benchmarks.chaos.load import REPEATED, Load
from benchmarks.chaos.result import RowResult
from benchmarks.chaos.scene import MissedError, Scene
from benchmarks.errors import BenchError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.chaos.answers import Outcome
    from benchmarks.chaos.asking import Asker
    from benchmarks.chaos.asks import Ask
    from benchmarks.chaos.scene import Fault
    from benchmarks.chaos.service import Service

# For what is held until a lease ends (`worker.kv.lease_s` of a run's settings), and a margin.
EMPTY_S: Final = 30.0
FAULT_S: Final = 900.0
_SHOWN_ERRORS: Final = 5


async def run_row(
    fault: Fault,
    service: Service,
    asker: Asker,
    asks: Sequence[Ask],
    expected: Mapping[int, Outcome],
    *,
    rate_per_s: float,
    rng: random.Random,
    doing: Callable[[str], None],
) -> RowResult:
    """Raises :class:`BenchError` where the service did not get whole again."""
    load = Load(asks, asker, rate_per_s)
    scene = Scene(service, load, rng)
    doing("waiting for its moment")
    running = asyncio.create_task(load.run())
    watching = asyncio.create_task(_watch(scene, doing))
    hit = True
    try:
        async with asyncio.timeout(FAULT_S):
            await fault.run(scene)
    except MissedError as missed:
        hit = False
        scene.note(str(missed))
    except TimeoutError:
        raise BenchError(f"{fault.name} was not over in {FAULT_S:g} s") from None
    finally:
        load.go_on()
        watching.cancel()
        if not hit or not load.is_over:
            doing(f"{len(load.open())} answers to come")
    try:
        await running
    finally:
        running.cancel()
    doing("waiting for all workers")
    await service.until_whole()
    whole_s = time.monotonic() - scene.struck_s if scene.struck_s else 0.0
    doing("looking for what is left")
    left = await service.until_empty(EMPTY_S)
    return _judge(fault, scene, expected, hit=hit, whole_s=whole_s, left=(left.blocks, left.what))


async def _watch(scene: Scene, doing: Callable[[str], None]) -> None:
    while True:
        if scene.struck_s:
            text = "; ".join(scene.notes[-1:]) or "struck"
            doing(f"{text}; {len(scene.load.open())} answers open")
        await asyncio.sleep(0.2)


def _judge(
    fault: Fault,
    scene: Scene,
    expected: Mapping[int, Outcome],
    *,
    hit: bool,
    whole_s: float,
    left: tuple[int, Sequence[str]],
) -> RowResult:
    outcomes = scene.load.outcomes
    failed = [x for x in outcomes.values() if x.ending != "ok"]
    excused = [x for x in failed if scene.excuses(x, within_s=TIMEOUT_S)]
    blamed = [x for x in failed if not scene.excuses(x, within_s=TIMEOUT_S)]
    wrong = {n: wrong_tokens(x, expected[n % REPEATED]) for n, x in outcomes.items()}
    fallbacks = Counter(step for x in outcomes.values() for step in x.fallbacks)
    errors = [f"request {x.number}: {x.error or x.ending}" for x in blamed]
    errors += [f"request {n}: {count} wrong tokens" for n, count in wrong.items() if count]
    in_time = [x for x in outcomes.values() if x.number not in scene.load.slow]
    told = Counter(x.code for x in excused if x.code)
    scene.notes += [f"{count} told {code}" for code, count in sorted(told.items())]
    return RowResult(
        name=fault.name,
        what=fault.what,
        hit=hit,
        requests=len(outcomes),
        failed=len(blamed),
        excused=len(excused),
        wrong_tokens=sum(wrong.values()),
        leaked_blocks=left[0],
        left=list(left[1]),
        pause_s=round(max((x.pause_s for x in in_time), default=0.0), 3),
        whole_s=round(whole_s, 3),
        fallbacks=dict(sorted(fallbacks.items())),
        notes=scene.notes,
        errors=errors[:_SHOWN_ERRORS],
    )
