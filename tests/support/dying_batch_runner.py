"""A router that runs the batches of a store until none is left, or dies at one of its store calls.

Arguments: the store, the folder of files, the number of the call, and whether to die before or
after the call is committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.background import background
from pdserve.config import StoreConfig
from router.api.answer_sinks import AnsweredLine
from router.api.batch.runner import BatchLimits, BatchRunner
from router.store.batches import OPEN
from router.store.store import make_store
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


async def answer(_path: str, data: bytes, _tenant: str, _timeout_s: float) -> AnsweredLine:
    prompt = json.loads(data)["prompt"]
    return AnsweredLine(prompt, json.dumps({"text": prompt}).encode())


async def main(place: str, folder: str, dies_at: int, moment: str) -> None:
    config = StoreConfig(database=place, files=folder)
    # The name is the same after each start, so that it can resume its claims at once.
    store = make_store(config, Path(place), "router")
    call, numbers = store.database._call, count(1)

    def counted(work: Callable[..., object], *, is_write: bool) -> object:
        # Several threads call this; each call gets its own number.
        number = next(numbers)
        if number == dies_at and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(work, is_write=is_write)
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    store.database._call = counted  # type: ignore[method-assign,assignment]
    limits = BatchLimits(look_s=0.01)
    runner = BatchRunner(store.files, store.batches, answer, max_line_bytes=1000, limits=limits)
    async with background("batches", runner.run):

        async def have_ended() -> bool:
            batches, _ = await store.batches.batches("acme", None, 100)
            return all(batch.status not in OPEN for batch in batches)

        await wait_until(have_ended)
    await store.files.close()
    await store.database.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
