"""One router's stream as a worker sees it: its open stream ids, and its frames on their way out."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import WorkerLoad
    from pdserve.v1 import worker_pb2 as w


_MAX_HELD = 4096


class Session:
    """State: engine stream ids by the router's own, those of prefills that ended and may hold
    blocks, the outgoing queue, when the router was told what steps cost, the load that it was told,
    and why the session was cut, once it was.

    The queue is bounded: a router that stops reading is cut rather than remembered without end.
    """

    def __init__(self, router_id: str, *, max_frames: int) -> None:
        self.router_id = router_id
        self.engine_ids: dict[int, int] = {}
        self.steps_told_at = -math.inf  # on the loop's clock
        self.load_told: WorkerLoad | None = None
        self._held: OrderedDict[int, int] = OrderedDict()
        self.cut_by: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self._frames: asyncio.Queue[w.StepFrame | None] = asyncio.Queue(max_frames)

    def hold(self, router_stream_id: int) -> None:
        """A prefill has said its last: a cancel may still come for the blocks that it holds.

        Only the latest are remembered; the blocks of others are free when their lease ends.
        """
        self._held[router_stream_id] = self.engine_ids[router_stream_id]
        if len(self._held) > _MAX_HELD:
            self._held.popitem(last=False)

    def take_held(self, router_stream_id: int) -> int | None:
        """The engine stream id of a prefill that ended, once."""
        return self._held.pop(router_stream_id, None)

    def take_all_held(self) -> list[int]:
        """Those of all prefills that ended."""
        held, self._held = list(self._held.values()), OrderedDict()
        return held

    def put(self, frame: w.StepFrame) -> None:
        """Queues a frame; nothing once the session is cut."""
        self._put(frame)

    def finish(self) -> None:
        """No frame follows those that are queued."""
        self._put(None)

    def cut(self, error: PdserveError) -> None:
        """End the session with `error`, without what is queued; the first error stays."""
        if not self.cut_by.done():
            self.cut_by.set_result(error)

    async def next_frame(self, within_s: float) -> w.StepFrame | None:
        """The next frame, or None after the last. Raises TimeoutError where none comes."""
        try:
            return self._frames.get_nowait()
        except asyncio.QueueEmpty:
            async with asyncio.timeout(within_s):
                return await self._frames.get()

    def _put(self, frame: w.StepFrame | None) -> None:
        if self.cut_by.done():
            return
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.cut(Overloaded(f"router {self.router_id} does not read its frames"))
