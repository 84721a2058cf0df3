"""Clients that go away: most of the requests are cancelled, at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene

_SHARE = 0.6


class AbortStorm:
    """What clients gave up themselves is not counted as failed."""

    name = "abort_storm"
    what = "clients of 60% of the requests break off, at any moment from queue to last token"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """Until all were sent."""
        decided: set[int] = set()
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        while not scene.load.is_over:
            for outcome in scene.load.open():
                if outcome.number in decided:
                    continue
                decided.add(outcome.number)
                if scene.rng.random() < _SHARE:
                    scene.struck()
                    scene.excused.add(outcome.number)
                    after_s = scene.rng.choice((0.0, 0.01, 0.05, 0.2, 0.5))
                    timers.append(loop.call_later(after_s, scene.load.abort, outcome.number))
            await asyncio.sleep(0.005)
        aborted = {n for n, x in scene.load.outcomes.items() if x.ending == "aborted"}
        scene.excused &= aborted  # one that failed before its client left is a failure
        scene.note(f"{len(aborted)} broken off")


ABORT_STORM = AbortStorm()
