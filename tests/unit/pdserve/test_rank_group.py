"""Ranks of a data-parallel group of `pdserve up`, which end as one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, cast

from pdserve.deploy.local.groups import RankGroup
from pdserve.deploy.local.restarts import Restarts, SupervisedProcess


class StartedProcess:
    def __init__(self) -> None:
        self.killed = asyncio.Event()

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.set()


async def test_a_rank_that_was_still_being_started_ends_with_the_others() -> None:
    ranks = [SupervisedProcess(name, Path("log"), Restarts(1.0)) for name in ("d-0", "d-1")]
    group = RankGroup(ranks)
    await asyncio.gather(group.meet(), group.meet())
    ending = asyncio.create_task(group.end_with(ranks[0], 0.0))
    await asyncio.sleep(0)  # it has looked once
    process = StartedProcess()
    ranks[1].process = cast("Any", process)
    killed = asyncio.create_task(process.killed.wait())
    done, _ = await asyncio.wait((ending, killed), return_when=asyncio.FIRST_COMPLETED)
    killed.cancel()
    assert done == {killed}
    ranks[1].process = None
    await asyncio.gather(ending, group.end_with(ranks[1], 0.0))
