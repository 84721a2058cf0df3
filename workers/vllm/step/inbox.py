"""What the event loop asks of the step thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import StreamDelta
    from workers.engine import Work
    from workers.vllm.core import VllmCore
    from workers.vllm.step.sleep import StepSleep

    # Run by the step thread; returns last deltas of streams that it ended.
    Action = Callable[[VllmCore], Sequence[StreamDelta] | None]


class StepInbox:
    """State, under a lock because both threads change it: the actions, and the error that ends
    requests once the step thread has stopped."""

    def __init__(self, sleep: StepSleep) -> None:
        """`sleep`: of the step thread, which new actions wake."""
        self._sleep = sleep
        self._lock = threading.Lock()
        self._actions: deque[tuple[Action, int | None]] = deque()  # with the id of a new stream
        self._end: PdserveError | None = None

    def __bool__(self) -> bool:
        return bool(self._actions)

    def put(self, action: Action, new_stream_id: int | None = None) -> PdserveError | None:
        """Let the step thread run `action`. Return the error if it has stopped."""
        with self._lock:
            if self._end is not None:
                return self._end
            self._actions.append((action, new_stream_id))
        self._sleep.wake()
        return None

    def add(self, work: Work, submitted: float) -> PdserveError | None:
        """Start a stream. `submitted`: when its work came. Return the error if that cannot be."""
        return self.put(lambda core: core.streams.add(work, submitted), work.stream_id)

    def take(self, core: VllmCore) -> list[StreamDelta]:
        """Run the actions, on the step thread. Return the last deltas of streams that they
        ended."""
        with self._lock:
            actions = list(self._actions)
            self._actions.clear()
        return [delta for action, _ in actions for delta in action(core) or ()]

    def stop(self, end: PdserveError) -> list[int]:
        """Take no more actions, because of `end`. Return new streams that did not start."""
        with self._lock:
            self._end = end
            waiting = [stream_id for _, stream_id in self._actions if stream_id is not None]
            self._actions.clear()
        return waiting
